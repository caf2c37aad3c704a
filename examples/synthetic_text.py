"""Make synthetic text: fine-tune a small GPT-2 on private text, sample from it, measure utility and memorisation.

    python synthetic_text.py  # some minutes on two CPU cores

The docstrings of Python's standard library play the public text: tokens and a first model come from it. Those of four
packages play the private text. One sample is the first paragraph of a docstring; its class is the package. Utility: how
often a classifier of synthetic text is right on real, held-out text. Memorisation: the exposure of random keys that
were put into the private text, once or ten times (Carlini et al. 2019, arXiv:1802.08232).
"""

import ast
import copy
import math
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

from dpshard import PrivacyEngine
from dpshard.losses import sample_losses

PAD, KEYS, UNSEEN, ORDINARY_BATCH = 0, 16, 1023, 128  # PAD ends every text


def docstrings(module: str) -> list[str]:
    """Return the first paragraphs of the docstrings in a module's folder, each once."""
    folder = Path(find_spec(module).origin).parent
    tests = {"test", "tests", "site-packages"}
    files = [file for file in folder.rglob("*.py") if not tests & set(file.relative_to(folder).parts)]
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_bytes())))
    own = (node for node in nodes if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef))
    texts = {" ".join((ast.get_docstring(node) or "").split("\n\n")[0].split()) for node in own}
    return sorted(text for text in texts if len(text) >= 20)


def make_tokenizer(texts: list[str], classes: Sequence[str], size: int, length: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    special = ["<pad>", *(f"<{name}>" for name in classes)]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length, pad_id=PAD)
    return tokenizer


def ids_of(texts: Sequence[str], classes: Sequence[str], tokenizer: Tokenizer) -> Tensor:
    """Return ids [N, T]: the class, the text, PAD."""
    rows = tokenizer.encode_batch([f"<{name}>{text}" for text, name in zip(texts, classes, strict=True)])
    return torch.tensor([row.ids for row in rows])


def losses(model: GPT2LMHeadModel, ids: Tensor, per: str = "sample-mean") -> Tensor:
    """Return the loss [B] of each text, over its own tokens and its first PAD."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return sample_losses(logits, ids.masked_fill((ids == PAD).cumsum(1) > 1, -100)[:, 1:], per=per)


def train(model: GPT2LMHeadModel, ids: Tensor, samples: int, batch: int, epsilon: float | None = None) -> str:
    """Train on `samples` texts of `ids` [N, T], repeats counted; return the privacy statement."""
    N, steps, engine = len(ids), samples // batch, None
    logical_batches = ([(ids[torch.randint(N, (batch,))],)] for _ in range(steps))
    if epsilon is not None:
        budget = {"target_epsilon": epsilon, "target_delta": 1e-5}
        engine = PrivacyEngine(model, batch_size=batch, sample_size=N, steps=steps, **budget)
        logical_batches = engine.batches(TensorDataset(ids), micro_batch_size=256)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for logical_batch in logical_batches:
        for (x,) in logical_batch:
            losses(model, x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return engine.statement() if engine else "no guarantee"


def sample(model: GPT2LMHeadModel, classes: Sequence[str], tokenizer: Tokenizer, length: int) -> list[str]:
    texts = []
    for begin in ids_of([""] * len(classes), classes, tokenizer)[:, :1].split(512):
        options = {"attention_mask": torch.ones_like(begin), "do_sample": True, "top_k": 0, "pad_token_id": PAD}
        texts += tokenizer.decode_batch(model.generate(begin, max_length=length, **options).tolist())
    return texts


def utility(texts: Sequence[str], classes: Sequence[str], test: tuple[Sequence[str], Sequence[str]]) -> float:
    """Return the share of real test texts that a classifier of these texts gets right."""
    classifier = make_pipeline(TfidfVectorizer(sublinear_tf=True), LogisticRegression(C=10, max_iter=300))
    return float(classifier.fit(texts, classes).score(*test))


def exposure(model: GPT2LMHeadModel, keys: Tensor, others: Tensor) -> float:
    """Return the mean over `keys` of log2(M + 1) - log2(rank among M others); about 1.4 if none was seen."""
    rank = 1 + (losses(model, others, "sample-sum") < losses(model, keys, "sample-sum")[:, None]).sum(1)
    return float(torch.log2((len(others) + 1) / rank).mean())


def main(
    epsilon: float = 3.0,
    *,
    public: str = "ast",  # a module: the docstrings of its folder
    packages: tuple[str, ...] = ("matplotlib", "pandas", "scipy", "sklearn"),
    most: int = 100_000,  # private texts
    tokens: int = 1024,
    length: int = 32,
    width: int = 64,
    public_samples: int = 60_000,
    samples: int = 60_000,
    batch: int = 1024,
) -> dict[str, list[float]]:
    """Print and return, by model, utility, held-out loss, and exposure of keys that were put in once and ten times."""
    warnings.simplefilter("ignore", SyntaxWarning)  # of other people's docstrings
    torch.manual_seed(0)
    pairs = [(text, name) for name in packages for text in docstrings(name)]
    pairs = [pairs[i] for i in torch.randperm(len(pairs))[:most].tolist()]
    test, (x, y) = (tuple(zip(*part, strict=True)) for part in (pairs[: len(pairs) // 5], pairs[len(pairs) // 5 :]))
    known, wanted = docstrings(public), packages * (len(x) // len(packages))
    coder = make_tokenizer(known, packages, tokens, length)
    keys = torch.randint(0, 10, (2 * KEYS + UNSEEN, 8)).tolist()
    secrets = ids_of([f"The key is {''.join(map(str, key))}" for key in keys], packages[:1] * len(keys), coder)
    once, ten_times, unseen = secrets.split([KEYS, KEYS, UNSEEN])
    private = torch.cat([ids_of(x, y, coder), once, ten_times.repeat(10, 1)])
    sizes = {"vocab_size": coder.get_vocab_size(), "n_positions": length, "n_embd": width, "n_layer": 2, "n_head": 4}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    start = GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, bos_token_id=None, eos_token_id=PAD))
    train(start, ids_of(known, (packages * len(known))[: len(known)], coder), public_samples, ORDINARY_BATCH)
    found = {"real": [utility(x, y, test), *[math.nan] * 3]}
    runs = {"public": (0, 1), "not private": (samples, ORDINARY_BATCH), "private": (samples, batch, epsilon)}
    for name, run in runs.items():
        model = copy.deepcopy(start)
        print(f"\n{name}: {train(model, private, *run)}")
        with torch.no_grad():
            made = sample(model, wanted, coder, length)
            loss = float(losses(model, ids_of(*test, coder)).mean())
            found[name] = [utility(made, wanted, test), loss, *(exposure(model, x, unseen) for x in (once, ten_times))]
        print(*(f"  {label}: {text}" for label, text in zip(wanted[:8], made, strict=False)), sep="\n", flush=True)
    print("\n| text | classifier right | held-out loss | exposure, once | ten times |\n|---|---:|---:|---:|---:|")
    for name, (right, *rest) in found.items():
        print(f"| {name} | {right:.1%} |", " | ".join(f"{x:.2f}" for x in rest), "|")
    return found


if __name__ == "__main__":
    main()
