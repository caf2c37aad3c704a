"""A run of the benchmarks at tiny size: figures, refusals, tables, pictures, and the page of the documents."""

import json

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import floor, largest, measure, profiling, results_files, tables, zero
from benchmarks.cli import app
from benchmarks.contenders import Task
from benchmarks.workloads import find
from dpshard.applications.benchmark import Subject
from dpshard.errors import ConfigurationError, DpshardError

SETTINGS = measure.Settings(rounds=3, threads=1, memory=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Results of a run and of a sweep."""
    out = tmp_path_factory.mktemp("results")
    tiny = ["--tiny", "--rounds", "2", "--threads", "1", "--no-memory", "--out", str(out)]
    for command in (
        ["run", "W4", "-c", "dpshard:layer-wise", "-c", "vmap", *tiny],
        ["sweep", "W3", "--axis", "B", "--values", "2,4", "-c", "vmap", *tiny],
    ):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
    return out


def test_results_hold_what_was_run_and_where(folder):
    result = json.loads((folder / "W4.json").read_text())
    assert [c["name"] for c in result["contenders"]] == ["nonprivate", "dpshard:layer-wise", "vmap"]
    ordinary, private, _ = result["contenders"]
    assert ordinary["ratio"]["median"] == 1
    assert private["update_error"] < 1e-3
    assert private["ratio"]["low"] <= private["ratio"]["median"] <= private["ratio"]["high"]
    assert private["flops"] > ordinary["flops"] > 0
    assert result["settings"]["rounds"] == 2
    assert result["environment"]["versions"]["torch"] == torch.__version__
    assert result["floor"]["ratio"] > 1


def test_tables_and_pictures_are_made_of_the_results(folder):
    text = (folder / "README.md").read_text()
    assert "### W4: MLP" in text
    assert "| dpshard:layer-wise | " in text
    assert "over the ordinary step, B = | 2 | 4 |" in text
    assert {p.name for p in folder.glob("*.png")} == {"workloads.png", "sweep-W3-B.png"}
    for name in ("workloads.png", "sweep-W3-B.png"):
        assert f"]({name})" in text


def test_the_page_shows_the_results_that_are_there():
    text = tables.PAGE.read_text("utf-8")
    assert tables.page(text) == text, "run `python -m benchmarks report`"


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "W1.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"W1\.json"):
        results_files.read(tmp_path, "workload")


def test_what_a_peer_cannot_do_is_said_and_what_dpshard_cannot_do_is_raised(monkeypatch):
    def fail(contender, task, **_):
        raise RuntimeError("out\nof order")

    monkeypatch.setattr(measure.oracle, "check", fail)
    result = measure.measure(find("W4", tiny=True), ["nonprivate", "vmap"], SETTINGS)
    assert result["contenders"][1] == {"name": "vmap", "error": "RuntimeError: out of order"}
    result["environment"] = results_files.environment()
    assert tables.refusals(result) == ["vmap was not timed: RuntimeError: out of order"]
    with pytest.raises(DpshardError, match="dpshard:all-layer on W4: out"):
        measure.measure(find("W4", tiny=True), ["nonprivate", "dpshard:all-layer"], SETTINGS)


def out_of_memory(monkeypatch, name, at):
    """Raise an out-of-memory error in step `at` (from 0) of contender `name`; return all steps taken."""
    step, taken = measure._step, []

    def limited(one, task, trainings):
        taken.append(one)
        made = measure.make(one, task) if one not in trainings else trainings[one]
        if one == name and taken.count(name) > at:
            monkeypatch.setattr(made, "step", fail)
        trainings[one] = made
        step(one, task, trainings)

    def fail():
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(measure, "_step", limited)
    return taken


@pytest.mark.parametrize("at", [0, measure.WARMUP + 1])
def test_a_contender_without_enough_memory_is_dropped_and_the_others_are_timed(monkeypatch, at):
    taken = out_of_memory(monkeypatch, "dpshard:layer-wise", at)
    names = ["nonprivate", "dpshard:layer-wise", "vmap"]
    result = measure.measure(find("W4", tiny=True), names, SETTINGS)
    ordinary, lost, peer = result["contenders"]
    assert ordinary["ratio"]["count"] == peer["ratio"]["count"] == SETTINGS.rounds
    assert "seconds" not in lost
    result["environment"] = results_files.environment()
    assert tables.refusals(result) == [
        "dpshard:layer-wise was not timed: OutOfMemoryError: CUDA out of memory. It was to be timed beside nonprivate."
    ]
    assert taken.count("dpshard:layer-wise") == at + 1


def test_a_baseline_without_enough_memory_is_raised(monkeypatch):
    out_of_memory(monkeypatch, "nonprivate", 0)
    with pytest.raises(DpshardError, match="nonprivate on W4: OutOfMemoryError: CUDA out of memory"):
        measure.measure(find("W4", tiny=True), ["nonprivate", "vmap"], SETTINGS)


def test_a_check_without_enough_memory_drops_the_contender(monkeypatch):
    def fail(contender, task, **_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(measure.oracle, "check", fail)
    result = measure.measure(find("W4", tiny=True), ["nonprivate", "dpshard:all-layer"], SETTINGS)
    assert result["contenders"][1]["error"] == "OutOfMemoryError: CUDA out of memory."
    assert result["contenders"][0]["ratio"]["median"] == 1


def test_steps_that_are_announced_are_taken():
    names, told = ["nonprivate", "vmap"], []
    measure.measure(find("W4", tiny=True), names, SETTINGS, told.append)
    assert len(told) == measure.steps_of(names, SETTINGS)


@pytest.mark.parametrize("flops", [1.0, 1e30])
def test_the_floor_of_a_linear_layer_is_that_of_the_formulas(flops):
    """On a machine without time to compute, Gram matrices win at T = 2; without time to copy, what reads less wins."""
    B, T, D, P = 3, 2, 40, 50
    model = torch.nn.Linear(D, P, bias=False)
    subject = Subject(model, torch.randn(B, T, D), torch.randn(B, T, P), torch.nn.functional.mse_loss)
    found = floor.floor_of(subject, B, floor.Machine(flops=flops, bandwidth=1.0))
    noise = 2 * 4 * D * P
    assert found.flops == B * T * T * (D + P + 2)
    assert found.nbytes == 4 * B * T * (D + P) + noise
    assert found.seconds == found.flops / flops + found.nbytes


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 31, 32, 1000])
def test_the_largest_batch_is_found_to_one_part_in_sixteen(limit):
    asked = []

    def fits(batch):
        asked.append(batch)
        return batch <= limit

    found = largest.largest_that_fits(fits)
    assert found <= limit
    assert limit - found <= max(0, found // 16)
    assert max(asked) <= 2 * max(1, limit)


def test_a_budget_beyond_the_machine_is_refused():
    with pytest.raises(ConfigurationError, match="Choose a smaller one"):
        largest.search(find("W4", tiny=True), ["nonprivate"], budget=2**60, threads=1, device="cpu")


def test_the_groups_of_a_profile_add_up_to_the_step():
    task = Task(workload=find("W3", tiny=True), threshold=1.0)
    found = profiling.profile("dpshard:all-layer", task, 1)
    groups = sum(ms for name, ms in found.items() if name != "whole step")
    assert found["convolutions"] > 0
    assert groups == pytest.approx(found["whole step"], rel=0.01) or found[profiling.OUTSIDE] == 0
    assert profiling.group_of("aten::addmm") == "matrix products"
    assert profiling.group_of("dpshard::ghost_norms") == "matrix products"
    assert profiling.group_of("aten::native_group_norm_backward") == "norm layers"
    assert profiling.group_of("dpshard::normalization_gradients") == "norm layers"
    assert profiling.group_of("ProfilerStep") == profiling.OUTSIDE


@pytest.mark.exhaustive
def test_profiles_noise_and_data_leave_tables(tmp_path):
    for command in (
        ["profile", "W3", "W4", "--steps", "1"],
        ["data", "W4", "--steps", "2"],
        ["noise"],
        ["verification", "W4", "--steps", "20"],
    ):
        outcome = CliRunner().invoke(app, [*command, "--tiny", "--threads", "1", "--out", str(tmp_path)])
        assert outcome.exit_code == 0, outcome.output
    text = (tmp_path / "README.md").read_text("utf-8")
    assert "| convolutions |" in text
    assert "| whole step |" in text
    assert "| 50,000 | 1,024 |" in text
    assert "| `secure_mode=True` |" in text
    (profiled,) = results_files.read(tmp_path, "profile")
    for figures in profiled["workloads"]:
        *groups, whole = figures["private"]
        assert sum(groups) == pytest.approx(whole, rel=0.01) or 0.0 in groups
    (verified,) = results_files.read(tmp_path, "verification")
    assert verified["costs"]["W4"]["first"] > verified["costs"]["W4"]["later"] > verified["costs"]["W4"]["look"] > 0
    (loaded,) = results_files.read(tmp_path, "data")
    assert 0 < loaded["waiting"]["W4"]["waiting"] < loaded["waiting"]["W4"]["seconds"]


@pytest.mark.exhaustive
def test_packed_rows_and_units_leave_tables(tmp_path):
    for command in (["packed", "--steps", "4"], ["units", "--rounds", "2", "--no-memory"]):
        outcome = CliRunner().invoke(app, [*command, "--tiny", "--out", str(tmp_path)])
        assert outcome.exit_code == 0, outcome.output
    text = (tmp_path / "README.md").read_text("utf-8")
    assert "| packed | " in text
    assert "| GPT, T = 64 | 16 | " in text
    (packed,) = results_files.read(tmp_path, "packed")
    assert [(row["packed"], row["private"]) for row in packed["rows"]] == [
        (True, True), (True, False), (False, True), (False, False),
    ]  # fmt: skip
    assert all(0 < row["fill"] <= 1 for row in packed["rows"])


@pytest.mark.exhaustive
def test_a_sharded_model_of_the_gpu_set_trains_in_bfloat16_at_tiny_size():
    setting = zero.Setting(ranks=1, precision="bf16", rounds=2, tiny=True)
    times = zero.launch("time", "fsdp2", find("G3"), [zero.ORDINARY, "layer-wise"], setting)
    assert {name: len(seconds) for name, seconds in times.items()} == {zero.ORDINARY: 2, "layer-wise": 2}


def test_unknown_stages_are_refused_before_anything_is_launched():
    with pytest.raises(ConfigurationError, match="stage='zero9'"):
        zero.measure(find("W1"), ["zero9"], [], zero.Setting())
