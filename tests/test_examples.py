"""The scripts under examples/ run, and learn."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from tests.distributed.launch import prints
from tests.extras import needs_deepspeed

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # where dataclasses look
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")  # Lightning, of a validation loader
@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("digits", 0.85),
        ("finetune", 0.75),
        pytest.param("huggingface_trainer", 0.4, marks=pytest.mark.exhaustive),
        ("accelerate_loop", 0.85),
        ("lightning_callback", 0.85),
    ],
)
def test_an_example_learns(name, right, capsys):
    assert load(name).main() >= right
    assert "epsilon = " in capsys.readouterr().out


@pytest.mark.exhaustive
def test_the_image_recipe_trains_at_a_tiny_size(capsys):
    recipe = load("augmentation")
    scores = recipe.main(recipe.TINY)
    assert all(0 <= score <= 1 for score in scores)
    assert "for one unit of up to 2 rows" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_both_ways_to_protect_users_train(capsys):
    found = load("user_level").main(users=60, batch=20, steps=3, seeds=1, rows=(2,))
    assert set(found) == {(epsilon, habits, 2) for epsilon in (0.5, 2.0) for habits in (0.0, 2.0)}
    assert "| 0.5 | 0 | 2 |" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_synthetic_text_learns_and_only_an_ordinary_model_keeps_secrets(capsys):
    """Keys of ten copies: the mean exposure of 16 of them, 1.4 if none was seen.

    At epsilon 0.1, ten copies move any score by at most 0.33 standard deviations (as under Gaussian privacy), so the
    mean is at most 1.9, and above 5 with a probability below 4e-7 (Chernoff).
    """
    tiny = {"most": 800, "tokens": 400, "length": 24, "width": 32, "public_samples": 4000, "samples": 8000}
    packages = ("matplotlib", "sklearn")
    found = load("synthetic_text").main(0.1, public="numpy", packages=packages, batch=256, **tiny)
    right, loss, _, exposure = zip(*found.values(), strict=True)
    assert right[0] > 0.8  # real text; so few synthetic texts of so small a model teach a classifier little
    assert loss[2] < loss[1] - 0.4
    assert exposure[2] > 5 > exposure[3]
    assert "epsilon = 0.1000 at delta = 1e-05" in capsys.readouterr().out


@needs_deepspeed
@pytest.mark.exhaustive
def test_deepspeed_learns_on_two_processes():
    """As its own launcher starts them, which adds an argument."""
    printed, _ = prints([sys.executable, EXAMPLES / "deepspeed_loop.py", "--local_rank=0"], 2)
    found = re.search(r"epsilon = 4\.0000 .*; ([\d.]+)% right", printed)
    assert found, printed
    assert float(found.group(1)) > 80


@pytest.mark.exhaustive
def test_half_precision_needs_no_loss_scaling():
    """Unscaled float16 learns as float32 does; a scale overflows if it is large, and shrinks the update if undone."""
    results = load("mixed_precision").main(epochs=12)
    for name in ("float32", "bfloat16", "float16"):
        right, overflowed = results[name]
        assert right > 0.8
        assert overflowed == 0
    assert results["float16, loss x 2^12, gradient / 2^12"][0] < 0.5
    assert results["float16, loss x 2^30"][1] > 0.1


@pytest.mark.exhaustive
def test_a_sharded_example_learns():
    printed, _ = prints([sys.executable, ROOT / "tests" / "as_script.py", EXAMPLES / "sharded.py"], 2)
    assert float(re.findall(r"^([\d.]+)%", printed, re.MULTILINE)[-1]) > 85
    assert "epsilon = " in printed


@pytest.mark.exhaustive
def test_a_pipeline_learns():
    printed, _ = prints([sys.executable, EXAMPLES / "pipeline.py"], 2)
    found = re.search(r"loss ([\d.]+) at the end\nepsilon = 3\.0000", printed)
    assert found, printed
    assert float(found.group(1)) < 1.5  # 2.3 by chance


@pytest.mark.exhaustive
def test_a_language_model_is_fine_tuned_in_shards(tmp_path):
    """A tiny GPT-2 on Python's language reference: what comes out is the adapters, and what was promised."""
    pytest.importorskip("peft")
    text, model = tmp_path / "text.txt", tmp_path / "model"
    text.write_text("\n\n".join(list(topics.values())[:40]))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.train([str(text)], trainers.BpeTrainer(vocab_size=300, special_tokens=["<|end|>"], show_progress=False))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(model)
    config = GPT2Config(vocab_size=300, n_positions=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(model)
    script = [ROOT / "tests" / "as_script.py", EXAMPLES / "finetune_transformers.py"]
    printed, _ = prints([sys.executable, *script, model, text, "--epochs", "1", "--out", tmp_path / "out"], 2)
    assert 0 < float(printed.split("held-out loss ")[1].split()[0]) < 10
    assert "epsilon = " in printed
    adapters = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {name.split(".")[4] for name in adapters} == {"0", "1"}
    assert all(weight.any() for name, weight in adapters.items() if "lora_B" in name)  # 0 before training


@pytest.mark.exhaustive
def test_the_mechanisms_are_drawn_and_told(tmp_path, capsys):
    """A few steps of small batches: that every experiment runs to its end, at the epsilon that it says."""
    mechanisms = load("mechanisms")
    mechanisms.main(["all", "--quick", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    for name in mechanisms.EXPERIMENTS:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        found = json.loads((tmp_path / f"{name}.json").read_text())
        assert mechanisms.table(found) in printed
        budget = {"decay": 2.0, "parameters": 1.0}.get(name, 8.0)
        for run in found.values():
            assert 0.98 * budget < run["epsilon"] <= budget
            assert 0 <= run["accuracy"] <= 1


def test_embeddings_under_a_norm_are_scale_invariant():
    """Twice the embeddings: the same output, and half of their gradient."""
    mechanisms = load("mechanisms")
    torch.manual_seed(0)
    model = mechanisms.MaskedLanguageModel().double()
    model.norm.eps = 0.0
    embeddings = [model.symbols.weight, model.positions.weight]
    ids = torch.randint(0, mechanisms.SYMBOLS, (5, mechanisms.T))
    outputs, gradients = [], []
    for _ in range(2):
        outputs.append(model(ids))
        gradients.append(torch.autograd.grad(outputs[-1].square().sum(), embeddings))
        for weight in embeddings:
            weight.data.mul_(2)
    assert torch.allclose(*outputs)
    for first, second in zip(*gradients, strict=True):
        assert torch.allclose(first, 2 * second)


@pytest.mark.exhaustive
def test_the_increasing_schedule_draws_fewer_samples():
    mechanisms = load("mechanisms")
    found, _ = mechanisms.schedule(mechanisms.QUICK)
    small, growing, large = (run["samples"] for run in found.values())
    assert small < growing < 0.9 * large
