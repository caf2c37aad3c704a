from dataclasses import asdict

import pytest
import yaml

from dpshard.applications.cli.formats import HELP, parse_phases, read_yaml
from dpshard.applications.cli.plan import PlanSettings
from dpshard.applications.cli.settings import TrainSettings, resolve
from dpshard.errors import ConfigurationError


def test_later_layers_override_earlier_ones():
    settings = resolve({"max_grad_norm": 2.0, "seed": 1}, {"seed": 5})
    assert (settings.max_grad_norm, settings.seed) == (2.0, 5)


def test_a_task_brings_its_own_defaults_which_a_setting_overrides():
    assert resolve({"task": "pydoc"}).max_length == 64
    assert resolve({"task": "pydoc", "max_length": 32}).max_length == 32


@pytest.mark.parametrize(
    ("given", "cleared"),
    [
        ({"steps": 10}, ["epochs"]),
        ({"noise_multiplier": 1.0}, ["target_epsilon"]),
        ({"phases": "8x2,16x3"}, ["epochs", "steps", "batch_size"]),
    ],
)
def test_a_setting_clears_the_defaults_that_exclude_it(given, cleared):
    settings = asdict(resolve(given))
    assert all(settings[name] is None for name in cleared)


def test_written_settings_read_back_the_same(tmp_path):
    for settings in (TrainSettings(), resolve({"task": "pydoc", "phases": "8x2", "noise_multiplier": 0.5})):
        path = tmp_path / "config.yaml"
        path.write_text(settings.to_yaml())
        assert resolve(read_yaml(path)) == settings


def test_yaml_may_write_dashes_and_exponents_without_a_point(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("target-delta: 1e-6\nlearning_rate: 1\n")
    settings = resolve(read_yaml(path))
    assert (settings.target_delta, settings.learning_rate) == (1e-6, 1.0)


def test_an_unknown_key_is_refused_with_the_list_of_known_ones():
    with pytest.raises(ConfigurationError, match=r"'learning_rat'.*learning_rate"):
        resolve({"learning_rat": 1.0})


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": "many"},
        {"steps": 2.5},
        {"steps": float("inf")},
        {"weight_decay": float("inf")},
        {"secure_mode": "maybe"},
        {"seed": True},
        {"model": "resnet"},
        {"task": ["digits"]},
        {"batch_size": 8, "phases": "8x1"},
        {"data": "x.csv", "task": "digits"},
        {"task": "data"},
        {"momentum": 1.0},
        {"clipping_quantile": 1.0},
        {"learning_rate": float("nan")},
        {"test_fraction": 0.6, "validation_fraction": 0.5},
        {"max_batch_size": "few"},
    ],
)
def test_a_setting_of_the_wrong_type_or_range_is_refused(wrong):
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        resolve(wrong)


@pytest.mark.parametrize("content", ["- a list\n", "key: [unclosed\n", "\xff"])
def test_a_file_that_holds_no_settings_is_refused(tmp_path, content):
    path = tmp_path / "settings.yaml"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigurationError, match=r"settings\.yaml"):
        read_yaml(path)


def test_phases_are_pairs_of_batch_and_steps():
    assert parse_phases("128x50,512x100") == [(128, 50), (512, 100)]
    for wrong in ("128*50", "128x50,512", ""):
        with pytest.raises(ConfigurationError, match="BATCHxSTEPS"):
            TrainSettings(batch_size=None, epochs=None, phases=wrong).mechanism()


def test_every_setting_has_a_help_text():
    for section, settings in (("train", TrainSettings), ("plan", PlanSettings)):
        texts = [item for panel in HELP[section].values() for item in panel.items()]
        assert [name for name, _ in texts] == list(settings.__dataclass_fields__)
        assert all(text.endswith(".") for _, text in texts)


def test_defaults_are_plain_yaml():
    assert yaml.safe_load(TrainSettings().to_yaml())["target_epsilon"] == 3.0
