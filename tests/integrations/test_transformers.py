"""`PrivateTrainer`: its updates are the oracle's, the Trainer leaves gradients alone, and a run resumes bit for bit.

Failure modes: 3 test_updates_are_the_oracles (accumulation); 11, 19 test_what_is_not_private_is_refused;
12 test_updates_are_the_oracles (samples of different lengths); 14, 17 test_two_processes_train_as_one;
24 test_a_resumed_run_is_the_same_bit_for_bit.
"""

import functools
import json
import logging
import re
import stat
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from dpshard import Packing
from dpshard.errors import CheckpointError, ConfigurationError, DataError, EngineInUseError, VerificationError
from dpshard.sampling import PoissonSampler
from tests.distributed.launch import launch
from tests.grids import quick
from tests.oracle import clipped_mean, norm, per_sample_gradients, relative_error
from tests.sums import taken_for_equal

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
accelerate = pytest.importorskip("accelerate")

from dpshard.integrations.token_losses import token_losses  # noqa: E402
from dpshard.integrations.transformers import PrivateSeq2SeqTrainer, PrivateTrainer  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:noise_multiplier=0"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

N, V = 24, 13


class Sentences(torch.utils.data.Dataset):
    """Sequences of 3 to 6 tokens, some without a label."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.rows = []
        for i in range(N):
            ids = torch.randint(1, V, (3 + i % 4,), generator=generator)
            labels = ids.clone()
            labels[i % 3] = -100
            self.rows.append({"input_ids": ids, "labels": labels, "row": i})

    def __len__(self):
        return N

    def __getitem__(self, i):
        return self.rows[i]


DATA = Sentences()


def collate(rows):
    ids = [row["input_ids"] for row in rows]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(x) for x in ids], batch_first=True),
        "labels": pad_sequence([row["labels"] for row in rows], batch_first=True, padding_value=-100),
    }


def tiny(cls, **settings):
    torch.manual_seed(0)
    return cls(cls.config_class(vocab_size=V, **settings)).double()


def gpt2(dropout=0.0):
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return tiny(transformers.GPT2LMHeadModel, n_positions=8, n_embd=8, n_layer=1, n_head=2, **ends, **rates)


def t5():
    ends = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    return tiny(transformers.T5ForConditionalGeneration, dropout_rate=0.0, **sizes, **ends)


def bert():
    rates = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return tiny(transformers.BertForMaskedLM, **sizes, **rates)


def arguments(folder, cls=transformers.TrainingArguments, **options):
    defaults = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "num_train_epochs": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "learning_rate": 0.05,
        "optim": "sgd",
    }
    return cls(str(folder), **{**defaults, **options})


def trainer_of(
    model, folder, cls=PrivateTrainer, privacy=None, arguments_class=transformers.TrainingArguments, **options
):
    names = ("compute_loss_func", "callbacks", "eval_dataset", "packing", "data_collator")
    own = {"data_collator": collate} | {k: options.pop(k) for k in names if k in options}
    return cls(
        model,
        arguments(folder, arguments_class, **options),
        train_dataset=DATA,
        privacy=privacy or {"noise_multiplier": 0.0, "max_grad_norm": 0.5, "clipping_fn": "abadi"},
        **own,
    )


class Watch(transformers.TrainerCallback):
    """Notes the gradients before the optimizer's step, after each step's batch was drawn."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.steps.append({name: p.grad.clone() for name, p in model.named_parameters()})


class Secret(transformers.TrainerCallback):
    """Fixes the run secret, so that every run has the same batches and noise."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_train_begin(self, *_, **__):
        self.trainer.engine._secret = bytes(range(32))


def own_loss(model):
    """Return an explicit loss of one sample, given how its model shifts tokens."""

    def loss(output, ids, labels):
        logits = output.logits
        if isinstance(model, transformers.GPT2LMHeadModel):
            logits, labels = logits[:, :-1], labels[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    return loss


@pytest.mark.parametrize("make", [gpt2, t5, bert])
def test_updates_are_the_oracles(make, tmp_path, caplog):
    """Samples of different lengths, several micro-batches, and no second clipping by the Trainer."""
    model, watch = make(), Watch()
    with caplog.at_level(logging.WARNING):
        options = {"max_grad_norm": 1e-3, "learning_rate": 0.0, "max_steps": 2}
        options |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
        trainer = trainer_of(model, tmp_path, callbacks=[watch], **options)
        trainer.add_callback(Secret(trainer))
    assert "max_grad_norm=0.001 of TrainingArguments is not applied" in caplog.text
    assert trainer.train().global_step == 2
    engine = trainer.engine
    assert engine.mechanism.schedule.sizes == (8, 8)
    assert [row["epsilon"] for row in trainer.state.log_history] == [float("inf")] * 3
    engine.detach()
    model.train()
    sampler = PoissonSampler(N, engine.mechanism.schedule, engine._secret)
    for step, update in enumerate(watch.steps):
        rows = sampler.draw(step).tolist()
        samples = [one_sample(model, DATA[i]) for i in rows]
        expected = clipped_mean(samples, max_grad_norm=0.5, batch_size=8)
        assert any(norm(sample) > 0.5 for sample in samples)
        assert relative_error(update, expected) < 1e-9
    assert norm(watch.steps[0]) > 1e-2
    for step, row in enumerate(trainer.state.log_history[:2]):
        losses = [one_loss(model, DATA[i]) for i in sampler.draw(step).tolist()]
        assert row["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)  # of samples, none of padding


@pytest.mark.parametrize("flattens", [False, True])
def test_packed_updates_are_the_oracles(flattens, tmp_path):
    """With any collator: it sees one document at a time."""
    model, watch = gpt2(), Watch()
    options = {"learning_rate": 0.0, "max_steps": 2, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    collator = transformers.DataCollatorWithFlattening() if flattens else collate
    packing = Packing(rows=2, tokens=13)
    trainer = trainer_of(model, tmp_path, callbacks=[watch], packing=packing, data_collator=collator, **options)
    trainer.add_callback(Secret(trainer))
    trainer.train()
    engine = trainer.engine
    engine.detach()
    model.train()
    sampler = PoissonSampler(N, engine.mechanism.schedule, engine._secret)
    for step, update in enumerate(watch.steps):
        samples = [one_sample(model, DATA[i]) for i in sampler.draw(step).tolist()]
        assert relative_error(update, clipped_mean(samples, max_grad_norm=0.5, batch_size=8)) < 1e-9
        losses = [one_loss(model, DATA[i]) for i in sampler.draw(step).tolist()]
        assert trainer.state.log_history[step]["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"data_collator": "flattening"}, r"DataCollatorWithFlattening puts several samples.*packing=dpshard\.Packing"),
        ({"packing": Packing(rows=1, tokens=9), "compute_loss_func": lambda *_, **__: 0}, "leave compute_loss_func"),
    ],
)
def test_what_packing_does_not_take_is_refused(options, match, tmp_path):
    if "data_collator" in options:
        options = {"data_collator": transformers.DataCollatorWithFlattening()}
    with pytest.raises(ConfigurationError, match=match):
        trainer_of(gpt2(), tmp_path, **options)


def test_packing_takes_no_encoder_with_a_decoder(tmp_path):
    with pytest.raises(ConfigurationError, match="not an encoder with a decoder"):
        trainer_of(t5(), tmp_path, packing=Packing(rows=1, tokens=9), max_steps=1).train()


@torch.no_grad()
def one_loss(model, row):
    batch = collate([row])
    return float(own_loss(model)(model(**batch), batch["input_ids"], batch["labels"]))


def one_sample(model, row):
    batch = collate([row])
    loss = own_loss(model)

    class OnIds(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids):
            return model(input_ids=ids, attention_mask=torch.ones_like(ids), **extra)

    extra = {}
    if isinstance(model, transformers.T5ForConditionalGeneration):
        extra["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    (sample,) = per_sample_gradients(OnIds(), (batch["input_ids"], batch["input_ids"], batch["labels"]), loss)
    return {name.removeprefix("model."): gradient for name, gradient in sample.items()}


def test_a_resumed_run_is_the_same_bit_for_bit(tmp_path):
    """With dropout, from the middle of an epoch, and the secret in a file that only its owner can read."""
    options = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch"}
    options["logging_steps"] = 6
    privacy = {"noise_multiplier": 1.0}
    whole = trainer_of(gpt2(0.2), tmp_path, privacy=privacy, **options)
    whole.train()
    assert len(whole.engine.metrics()) > 0
    checkpoint = tmp_path / "checkpoint-2"
    assert stat.S_IMODE((checkpoint / "dpshard.json").stat().st_mode) == 0o600
    again = trainer_of(gpt2(0.2), tmp_path, privacy=privacy, **options)
    torch.manual_seed(99)
    again.train(resume_from_checkpoint=str(checkpoint))
    assert again.state.global_step == again.engine.step == 6
    assert again.engine.state_dict() == whole.engine.state_dict()
    assert again.state.log_history[-1]["epsilon"] == again.engine.epsilon()
    for p, q in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(p, q)
    with pytest.raises(EngineInUseError, match="has trained before"):
        again.train()


def lora():
    model = gpt2()
    config = peft.LoraConfig(r=2, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft uses a name by its old spelling
        torch.manual_seed(1)
        return peft.get_peft_model(model, config).double()


RUN = {"max_steps": 3, "optim": "adamw_torch", "save_strategy": "steps", "save_steps": 2, "eval_on_start": True}
CASES = {
    "ddp": (gpt2, RUN),
    "fsdp2": (
        gpt2,
        {
            **RUN,
            "fsdp": True,
            "fsdp_config": {
                "state_dict_type": "SHARDED_STATE_DICT",
                "activation_checkpointing": True,
                "cpu_ram_efficient_loading": True,
            },
        },
    ),
    "lora": (lora, {**RUN, "fsdp": True}),
}
"""Model and arguments of a training on two processes; the Trainer would not enable FSDP on CPUs."""
WRAPPED = {"ddp": "DistributedDataParallel", "fsdp2": "FSDPGPT2LMHeadModel", "lora": "FSDPPeftModelForCausalLM"}
PROMPT = [[1, 2, 3]]


@pytest.mark.parametrize("case", quick("fsdp2", rest=["ddp", "lora"]))
@pytest.mark.exhaustive
def test_two_processes_train_as_one(case, tmp_path):
    """With noise and logs, and half of the accumulation steps; they also save, resume and generate."""
    worker = Path(__file__).with_name("trainer_worker.py")
    (result,) = launch(worker, 2, tmp_path / "two", case, timeout=200)
    with taken_for_equal():
        trainer = train_alone(CASES[case][0], tmp_path / "alone")
    assert (result["wrapped"], result["steps"], result["resumed"]) == (WRAPPED[case], 3, True)
    assert "dpshard.json" in result["saved"]
    for found, logged in zip(result["logs"], trainer.state.log_history, strict=False):
        for name in {"loss", "epsilon", "grad_norm"} & logged.keys():
            assert found[name] == pytest.approx(logged[name], rel=1e-6)
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    for values, parameter in zip(result["parameters"], trained, strict=True):
        torch.testing.assert_close(torch.tensor(values, dtype=torch.float64), parameter.detach().flatten())
    generated = trainer.model.generate(input_ids=torch.tensor(PROMPT), max_new_tokens=3)
    assert result["generated"] == generated.tolist()


def train_alone(make, folder):
    privacy = {"noise_multiplier": 1.0}
    trainer = trainer_of(make(), folder, privacy=privacy, eval_dataset=DATA, **{**RUN, "save_strategy": "no"})
    trainer.add_callback(Secret(trainer))
    trainer.train()
    assert sum("loss" in row for row in trainer.state.log_history) == 3
    return trainer


@pytest.mark.parametrize("damage", ["missing", "other step"])
def test_what_was_spent_cannot_be_left_behind(damage, tmp_path):
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    trainer_of(gpt2(), tmp_path, **options).train()
    file = tmp_path / "checkpoint-2" / "dpshard.json"
    if damage == "missing":
        file.unlink()
    else:
        file.write_text((tmp_path / "checkpoint-1" / "dpshard.json").read_text())
    trainer = trainer_of(gpt2(), tmp_path, **options)
    with pytest.raises(CheckpointError, match=r"the spent budget|another step"):
        trainer.train(resume_from_checkpoint=str(file.parent))


@pytest.mark.exhaustive
def test_evaluation_and_generation_work_within_and_after_the_training(tmp_path):
    trainer = trainer_of(
        t5(),
        tmp_path,
        cls=PrivateSeq2SeqTrainer,
        privacy={"noise_multiplier": 1.0},
        eval_dataset=DATA,
        max_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        logging_steps=2,
        predict_with_generate=True,
        arguments_class=transformers.Seq2SeqTrainingArguments,
    )
    trainer.train()
    assert trainer.engine.step == 2
    assert sum("eval_loss" in row for row in trainer.state.log_history) == 2
    assert len(trainer.predict(DATA, max_new_tokens=3).predictions) == N
    assert trainer.model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2).shape[0] == 1
    assert json.loads(json.dumps(trainer.state.log_history))[-1]["epsilon"] == trainer.engine.epsilon()


class Pooled(nn.Module):
    """A user's model with its own loss, which the Trainer gets or not."""

    def __init__(self, balance=0.0):
        super().__init__()
        self.embedding, self.head = nn.Embedding(V, 6), nn.Linear(6, V)
        self.balance = balance

    def forward(self, input_ids, attention_mask=None, labels=None):
        logits = self.head(self.embedding(input_ids))
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + self.balance * logits.mean((0, 1)).var()
        return {"loss": loss, "logits": logits}


def per_sample_loss(outputs, labels, num_items_in_batch=None):
    losses = F.cross_entropy(outputs["logits"].transpose(1, 2), labels, reduction="none")
    return (losses.sum(1) / labels.ne(-100).sum(1).clamp(min=1)).mean()


def token_mean(outputs, labels, num_items_in_batch=None):
    return F.cross_entropy(outputs["logits"].transpose(1, 2), labels)


def test_a_loss_that_is_none_of_tokens_must_be_given(tmp_path):
    with pytest.raises(ConfigurationError, match="not the mean cross-entropy of its tokens"):
        trainer_of(Pooled(balance=5.0), tmp_path).train()
    trainer_of(Pooled(), tmp_path, max_steps=1).train()
    trainer_of(Pooled(balance=5.0), tmp_path, max_steps=1, compute_loss_func=per_sample_loss).train()


@pytest.mark.parametrize("make", [gpt2, bert])
def test_a_loss_that_was_rounded_is_told_apart(make, tmp_path):
    """FSDP2 casts outputs, including the loss, to the dtype of its policy."""
    model = make().float()
    for p in model.parameters():
        p.data.mul_(20)  # as confident as a trained model
    forward = model.forward

    @functools.wraps(forward)  # the Trainer reads the names of its arguments
    def rounded(*args, **kwargs):
        outputs = forward(*args, **kwargs)
        loss = None if outputs.loss is None else outputs.loss.bfloat16()
        return type(outputs)(loss=loss, logits=outputs.logits.bfloat16())

    model.forward = rounded
    trainer = trainer_of(model, tmp_path, max_steps=1, privacy={"noise_multiplier": 0.0, "verify": False})
    trainer.train()
    assert trainer._shift is (make is gpt2)


def test_labels_that_cannot_be_told_apart_are_refused(tmp_path):
    model = gpt2()
    model.transformer.wte.weight.data.zero_()  # all tokens are equally likely
    with pytest.raises(ConfigurationError, match="The labels of GPT2LMHeadModel may name"):
        trainer_of(model, tmp_path).train()


def test_a_given_loss_that_mixes_samples_is_found_out(tmp_path):
    with pytest.raises(VerificationError):
        trainer_of(Pooled(), tmp_path, max_steps=1, compute_loss_func=token_mean).train()


class Pictures(torch.utils.data.Dataset):
    """Samples of class 0, except the last."""

    def __len__(self):
        return N

    def __getitem__(self, i):
        return {"x": torch.full((3,), float(i % 5)), "labels": int(i == N - 1)}


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x, labels=None):
        return {"logits": self.head(x)}


def class_weighted(outputs, labels, num_items_in_batch=None):
    return F.cross_entropy(outputs["logits"], labels, weight=torch.tensor([1.0, 10.0]))


def one_class_ignored(outputs, labels, num_items_in_batch=None):
    return F.cross_entropy(outputs["logits"], labels, ignore_index=1)


def class_weighted_apart(outputs, labels, num_items_in_batch=None):
    weights = torch.tensor([1.0, 10.0])[labels]
    return (F.cross_entropy(outputs["logits"], labels, reduction="none") * weights).mean()


@pytest.mark.parametrize("loss", [class_weighted, one_class_ignored, class_weighted_apart])
def test_a_given_loss_is_compared_when_a_new_label_comes(loss, tmp_path):
    """The first micro-batch seldom has the rare label that shows the divisor. One sample then counts several times."""
    trainer = PrivateTrainer(
        Scores(),
        arguments(tmp_path, max_steps=12),
        train_dataset=Pictures(),
        compute_loss_func=loss,
        privacy={"noise_multiplier": 0.0},
    )
    trainer.add_callback(Secret(trainer))  # the rare sample is not in the first micro-batch
    if loss is class_weighted_apart:
        trainer.train()
        assert trainer.engine.step == 12
        return
    with pytest.raises(VerificationError, match="compute_loss_func gives"):
        trainer.train()


class Pixels(Pictures):
    """Images of three pixels with a class each; the last image has pixels of no class, 255."""

    def __getitem__(self, i):
        labels = torch.tensor([0, 255, 255] if i == N - 1 else [0, 1, i % 2])
        return {"x": torch.eye(3) * (i % 5), "labels": labels}


def pixel_mean(outputs, labels, num_items_in_batch=None):
    return F.cross_entropy(outputs["logits"].mT, labels, ignore_index=255)


def mean_of_image_means(outputs, labels, num_items_in_batch=None):
    losses = F.cross_entropy(outputs["logits"].mT, labels, ignore_index=255, reduction="none")
    return (losses.sum(1) / (labels != 255).sum(1)).mean()


@pytest.mark.parametrize("loss", [pixel_mean, mean_of_image_means])
def test_a_given_loss_may_ignore_a_label_of_its_own(loss, tmp_path):
    """Verification uses -100 only if the labels have it."""
    options = {"train_dataset": Pixels(), "compute_loss_func": loss, "privacy": {"noise_multiplier": 0.0}}
    trainer = PrivateTrainer(Scores(), arguments(tmp_path, max_steps=12), **options)
    trainer.add_callback(Secret(trainer))
    if loss is mean_of_image_means:
        trainer.train()
        return
    with pytest.raises(VerificationError, match="compute_loss_func gives"):
        trainer.train()


def test_labels_that_do_not_fit_the_logits_ask_for_a_loss(tmp_path):
    """For example labels of an image's patches, with logits of the whole image."""
    with pytest.raises(
        ConfigurationError, match=r"do not name a class for every position of the logits.*compute_loss_func"
    ):
        token_losses({"logits": torch.randn(2, V)}, torch.zeros(2, 3, dtype=torch.long), shift=False)


class TokenMean(PrivateTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(inputs["input_ids"])
        loss = token_mean(outputs, inputs["labels"])
        return (loss, outputs) if return_outputs else loss


def test_a_loss_that_overrides_ours_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"TokenMean overrides compute_loss.*compute_loss_func"):
        TokenMean(gpt2(), arguments(tmp_path), privacy={"noise_multiplier": 1.0})


class Labelled(torch.utils.data.Dataset):
    """Sequences with one class each; the class of the last ones is -100."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return {"input_ids": torch.arange(4) + index % 3, "labels": torch.tensor(0 if index < 3 else -100)}


def test_labels_that_count_for_nothing_are_refused(tmp_path):
    """They change the divisor of the other losses; the first samples may not show it."""
    model = transformers.BertForSequenceClassification(bert().config).double()
    trainer = PrivateTrainer(model, arguments(tmp_path), train_dataset=Labelled(), privacy={"noise_multiplier": 1.0})
    with pytest.raises(ConfigurationError, match=r"label -100.*Leave them out"):
        trainer.train()


REFUSED = {
    "loss scaling": ({"fp16": True}, "bf16=True"),
    "smoothing": ({"label_smoothing_factor": 0.1}, "compute_loss_func"),
    "noise of embeddings": ({"neftune_noise_alpha": 5.0}, "length to which the micro-batch is padded"),
    "deepspeed": ({"deepspeed": {"zero_optimization": {"stage": 1}}}, "deepspeed.initialize()"),
    "data parallel": ({"_n_gpu": 2}, "one process for each by torchrun"),
    "retries": ({"auto_find_batch_size": True}, "per_device_train_batch_size"),
    "secret on the hub": ({"push_to_hub": True, "hub_strategy": "checkpoint"}, "run secret"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_private_is_refused(case, tmp_path):
    options, message = REFUSED[case]
    args = arguments(tmp_path)
    for name, value in options.items():
        setattr(args, name, value)
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        PrivateTrainer(gpt2(), args, privacy={"noise_multiplier": 1.0})


def test_accumulation_that_is_set_twice_is_refused(tmp_path):
    args = arguments(tmp_path, accelerator_config={"gradient_accumulation_kwargs": {"num_steps": 2}})
    with pytest.raises(ConfigurationError, match="set gradient_accumulation_steps"):
        PrivateTrainer(gpt2(), args, privacy={"noise_multiplier": 1.0})


def test_an_empty_data_set_is_refused(tmp_path):
    args = arguments(tmp_path)
    trainer = PrivateTrainer(gpt2(), args, train_dataset=[], privacy={"noise_multiplier": 1.0})
    with pytest.raises(DataError, match="empty: check the path or the filter"):
        trainer.train()


def test_settings_that_follow_from_the_trainer_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="batch_size, which follow from the Trainer"):
        trainer_of(gpt2(), tmp_path, privacy={"target_epsilon": 1.0, "batch_size": 3})


def test_processes_that_share_a_sample_are_refused(tmp_path, monkeypatch):
    create = transformers.Trainer.create_accelerator_and_postprocess

    def create_with_context_parallelism(trainer):
        create(trainer)
        trainer.accelerator.state.parallelism_config = accelerate.ParallelismConfig(cp_size=2, dp_shard_size=2)

    monkeypatch.setattr(transformers.Trainer, "create_accelerator_and_postprocess", create_with_context_parallelism)
    with pytest.raises(ConfigurationError, match="lets several processes share a sample"):
        trainer_of(gpt2(), tmp_path)
