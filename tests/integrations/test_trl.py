"""TRL's trainers: updates are the oracle's, a pair is one unit, and what packs or mixes samples is refused.

Failure modes: 3 test_an_update_of_dpo_is_the_oracles_by_pairs; 12 test_what_mixes_samples_is_refused.
"""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from dpshard import Packing
from dpshard.errors import ConfigurationError
from tests.distributed.launch import launch
from tests.integrations.test_transformers import Secret, gpt2
from tests.oracle import clipped_mean, norm, relative_error

trl = pytest.importorskip("trl", reason="trl, in the extra [dev], is not installed: its trainers are not tested")
datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")

from dpshard.integrations.transformers import PrivateTrainer  # noqa: E402
from dpshard.integrations.trl import PrivateDPOTrainer, PrivateSFTTrainer  # noqa: E402
from dpshard.sampling import PoissonSampler  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:noise_multiplier=0"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:trl.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

N, V = 20, 13
PRIVACY = {"noise_multiplier": 0.0, "max_grad_norm": 0.5, "clipping_fn": "abadi"}


class Watch(transformers.TrainerCallback):
    """Notes the gradients of what is trained, before the optimizer's step."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.steps.append({name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad})


class P(PrivateTrainer, trl.SFTTrainer):
    """The two classes put together by a user."""


def ids(n, seed):
    return torch.randint(1, V, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {str(i): i for i in range(V)}
    fast = Tokenizer(models.WordLevel(words, unk_token="0"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="0", eos_token="0", unk_token="0")


def arguments(cls, folder, **options):
    defaults = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "max_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "learning_rate": 0.0,
        "optim": "sgd",
        "bf16": False,
        "gradient_checkpointing": False,
        "dataset_num_proc": None,
    }
    return cls(str(folder), **{**defaults, **options})


def update_of(trainer):
    """Train for a step; return the update, and the numbers of the samples drawn."""
    watch = Watch()
    trainer.add_callback(watch)
    trainer.add_callback(Secret(trainer))
    trainer.train()
    engine = trainer.engine
    engine.detach()
    rows = PoissonSampler(N, engine.mechanism.schedule, engine._secret).draw(0).tolist()
    assert rows
    return watch.steps[0], rows


def assert_oracles(update, model, losses, B):
    names = {name: p for name, p in model.named_parameters() if p.requires_grad}
    samples = []
    for loss in losses:
        model.zero_grad()
        samples.append(dict(zip(names, torch.autograd.grad(loss(), list(names.values())), strict=True)))
    assert any(norm(sample) > 0.5 for sample in samples)
    assert relative_error(update, clipped_mean(samples, max_grad_norm=0.5, batch_size=B)) < 1e-6


@pytest.mark.parametrize("cls", [P, PrivateSFTTrainer])
def test_an_update_of_sft_is_the_oracles(cls, tmp_path):
    """Samples of different lengths; each counts by its own mean over tokens."""
    rows = [{"input_ids": ids(3 + i % 4, i)} for i in range(N)]
    model = gpt2()
    trainer = cls(
        model,
        arguments(trl.SFTConfig, tmp_path, max_length=8),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer(),
        privacy=PRIVACY,
    )
    update, drawn = update_of(trainer)
    model.train()

    def loss(i):
        x = torch.tensor([rows[i]["input_ids"]])
        return F.cross_entropy(model(input_ids=x).logits[0, :-1], x[0, 1:])

    assert_oracles(update, model, [lambda i=i: loss(i) for i in drawn], 8)


def _prompted(i):
    """Where i is odd, the first token is a prompt, which has no label."""
    x = ids(3 + i % 4, i)
    return {"input_ids": x, "labels": [-100, -100, *x[2:]] if i % 2 else x}


@pytest.mark.parametrize(
    ("cls", "options", "packing"),
    [
        (PrivateSFTTrainer, {"packing": True}, None),
        (P, {"padding_free": True}, None),
        (PrivateSFTTrainer, {}, Packing(rows=2, tokens=11)),
    ],
)
def test_packed_documents_of_sft_are_clipped_one_by_one(cls, options, packing, tmp_path):
    """A row holds several documents; the update is the oracle's, one document at a time."""
    rows, shapes = [_prompted(i) for i in range(N)], []
    model = gpt2()
    settings = {"max_length": 12, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    trainer = cls(
        model,
        arguments(trl.SFTConfig, tmp_path, **settings, **options),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer(),
        privacy=PRIVACY,
        packing=packing,
    )
    given = trainer._packed_loss
    trainer._packed_loss = lambda model, inputs, more: (shapes.append(inputs["unit_ids"]), given(model, inputs, more))[
        1
    ]
    update, drawn = update_of(trainer)
    model.train()
    assert {tuple(units.shape) for units in shapes} == {(1, 12) if packing is None else (2, 11)}
    assert any(int(units.max()) > 0 for units in shapes)

    def loss(i):
        x, y = torch.tensor([rows[i]["input_ids"]]), torch.tensor(rows[i]["labels"])
        return F.cross_entropy(model(input_ids=x).logits[0, :-1], y[1:])

    assert_oracles(update, model, [lambda i=i: loss(i) for i in drawn], 8)


def test_rows_that_were_packed_before_are_refused(tmp_path):
    """A document that TRL splits is in two of these rows, and counted as two samples."""
    documents = datasets.Dataset.from_dict({"input_ids": [ids(3 + 5 * i % 17, i) for i in range(N)]})
    trainer = PrivateSFTTrainer(
        gpt2(),
        arguments(trl.SFTConfig, tmp_path, max_length=12),
        train_dataset=trl.pack_dataset(documents, 12, "bfd_split"),
        processing_class=tokenizer(),
        privacy=PRIVACY,
    )
    with pytest.raises(ConfigurationError, match="column seq_lengths"):
        trainer.train()


@pytest.mark.parametrize("kind", ["a model", "precomputed", "the base of adapters"])
def test_an_update_of_dpo_is_the_oracles_by_pairs(kind, tmp_path):
    """The reference is a model, the numbers that a model gave before, or the model without its adapters."""
    rows = [
        {"prompt_ids": ids(2, i), "chosen_ids": ids(2 + i % 3, 50 + i), "rejected_ids": ids(1 + i % 2, 90 + i)}
        for i in range(N)
    ]
    texts = [{name.removesuffix("_ids"): " ".join(map(str, x)) for name, x in row.items()} for row in rows]
    model = gpt2()
    reference = gpt2()
    with torch.no_grad():
        for p in reference.parameters():
            p.add_(0.1)
    lora = kind == "the base of adapters"
    more = {}
    if lora:
        peft = pytest.importorskip("peft")
        settings = {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True, "task_type": "CAUSAL_LM"}
        more = {"peft_config": peft.LoraConfig(**settings, init_lora_weights=False)}
    trainer = PrivateDPOTrainer(
        model,
        None if lora else reference,
        arguments(trl.DPOConfig, tmp_path, max_length=None, beta=3.0, precompute_ref_log_probs=kind == "precomputed"),
        train_dataset=datasets.Dataset.from_list(texts),
        processing_class=tokenizer(),
        privacy=PRIVACY,
        **more,
    )
    prepared, model = trainer.train_dataset, trainer.model.double()
    update, drawn = update_of(trainer)
    update = {name.removeprefix("model."): g for name, g in update.items()}
    model.train()

    def log_prob(network, prompt, completion):
        x = torch.tensor([prompt + completion])
        logits = network(input_ids=x).logits[0, :-1].log_softmax(-1)
        return logits.gather(1, x[0, 1:, None])[len(prompt) - 1 :].sum()

    def loss(i):
        row = prepared[i]
        pair = [(row["prompt_ids"], row[f"{kind}_ids"]) for kind in ("chosen", "rejected")]
        ours = log_prob(model, *pair[0]) - log_prob(model, *pair[1])
        frozen = model if lora else reference
        with torch.no_grad(), model.disable_adapter() if lora else nullcontext():
            theirs = log_prob(frozen, *pair[0]) - log_prob(frozen, *pair[1])
        return -F.logsigmoid(3.0 * (ours - theirs))

    assert_oracles(update, model, [lambda i=i: loss(i) for i in drawn], 8)


def test_dpo_trains_half_of_the_adapters_and_evaluates_between(tmp_path):
    """With lora_A frozen there is less noise. peft makes it trainable again after the reference."""
    peft = pytest.importorskip("peft")
    rows = [{"prompt": "1 2", "chosen": f"{1 + i % 9} 3", "rejected": f"{1 + i % 7}"} for i in range(N)]
    settings = {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True, "task_type": "CAUSAL_LM"}
    trainer = PrivateDPOTrainer(
        gpt2(),
        None,
        arguments(trl.DPOConfig, tmp_path, max_length=None, max_steps=2, eval_strategy="steps", eval_steps=1),
        train_dataset=datasets.Dataset.from_list(rows),
        eval_dataset=datasets.Dataset.from_list(rows[:4]),
        processing_class=tokenizer(),
        privacy=PRIVACY,
        peft_config=peft.LoraConfig(**settings),
    )
    for name, p in trainer.model.named_parameters():
        if "lora_A" in name:
            p.requires_grad_(False)
    watch = Watch()
    trainer.add_callback(watch)
    trainer.train()
    trainer.engine.detach()
    assert len(watch.steps) == 2
    assert all("lora_B" in name for step in watch.steps for name in step)
    assert all(step for step in watch.steps)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"packing": True, "max_length": None}, "packing=True needs the length of a row.*or set max_length"),
        ({"padding_free": True, "max_length": None}, "padding_free=True needs the length of a row"),
        ({"loss_type": "dft"}, "loss_type='dft'"),
    ],
)
@pytest.mark.parametrize("cls", [P, PrivateSFTTrainer])
def test_what_mixes_samples_is_refused(cls, options, reason, tmp_path):
    with pytest.raises(ConfigurationError, match=reason):
        cls(gpt2(), arguments(trl.SFTConfig, tmp_path, **options), privacy=PRIVACY)


def test_a_loss_that_nobody_knows_is_refused(tmp_path):
    class Q(PrivateTrainer, trl.DPOTrainer):
        pass

    with pytest.raises(ConfigurationError, match=r"^DPOTrainer has a loss of its own.*PrivateDPOTrainer"):
        Q(gpt2(), args=arguments(trl.DPOConfig, tmp_path), privacy=PRIVACY)


@pytest.mark.parametrize(
    "options", [{"loss_type": ["aot"]}, {"loss_type": ["sft"]}, {"use_weighting": True}, {"padding_free": True}]
)
def test_losses_that_mix_pairs_are_refused(options, tmp_path):
    with pytest.raises(ConfigurationError, match="sigmoid loss of DPO"):
        PrivateDPOTrainer(gpt2(), args=arguments(trl.DPOConfig, tmp_path, **options), privacy=PRIVACY)


@pytest.mark.exhaustive
def test_dpo_on_two_processes_trains_as_on_one(tmp_path):
    """The run of one process is the oracle's, above. It evaluates between steps, too."""
    worker = Path(__file__).with_name("dpo_worker.py")
    two, one = (launch(worker, ranks, tmp_path / str(ranks), str(4 // ranks)) for ranks in (2, 1))
    before, after, _ = one[0]
    assert max(abs(x - y) for x, y in zip(before, after, strict=True)) > 1e-3
    for same, found, wrapped in two:
        assert wrapped == "DistributedDataParallel"
        assert same == before
        assert found == pytest.approx(after, abs=1e-6)
