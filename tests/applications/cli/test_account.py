import json
import re

import pytest

from dpshard.accounting import Release, compute_epsilon
from dpshard.applications.cli import plots

MNIST = "--sample-size 60000 --batch-size 256".split()


def ask(dpshard, *arguments):
    result = json.loads(dpshard("account", *MNIST, *arguments, "--json").stdout)
    return result["asked"], {answer["accountant"]: answer for answer in result["answers"]}


def test_epsilon_of_the_tutorial_of_the_field(dpshard):
    asked, answers = ask(dpshard, "--steps", 14063, "--sigma", 1.1)
    assert asked == "epsilon"
    assert answers["rdp"]["epsilon"] == pytest.approx(2.5967, abs=5e-5)
    assert answers["pld"]["epsilon"] == pytest.approx(2.3818, abs=5e-5)
    assert [answers[name]["upper_bound"] for name in ("pld", "rdp", "gdp")] == [True, True, False]


def test_the_noise_for_a_budget_keeps_to_the_budget(dpshard):
    asked, answers = ask(dpshard, "--epochs", 10, "--epsilon", 2, "--accountant", "pld")
    assert asked == "noise_multiplier"
    assert answers["pld"]["steps"] == round(10 * 60000 / 256)
    _, back = ask(dpshard, "--epochs", 10, "--sigma", answers["pld"]["noise_multiplier"], "--accountant", "pld")
    assert 1.99 < back["pld"]["epsilon"] <= 2


def test_the_steps_for_a_budget_are_the_most_that_fit(dpshard):
    asked, answers = ask(dpshard, "--sigma", 1, "--epsilon", 2, "--accountant", "rdp")
    assert asked == "steps"
    steps = answers["rdp"]["steps"]
    for more, fits in ((0, True), (1, False)):
        _, run = ask(dpshard, "--sigma", 1, "--steps", steps + more, "--accountant", "rdp")
        assert (run["rdp"]["epsilon"] <= 2) == fits


def test_phases_of_equal_batches_are_one_run(dpshard):
    run = ["account", "--sample-size", 60000, "--sigma", 1, "--accountant", "pld", "--json"]
    split, whole = (json.loads(dpshard(*run, "--phases", p).stdout)["answers"] for p in ("256x40,256x60", "256x100"))
    assert split == whole


def test_a_cap_is_analysed_by_pld_under_its_own_relation(dpshard):
    _, answers = ask(dpshard, "--steps", 100, "--sigma", 1, "--max-batch-size", 352)
    assert answers.keys() == {"pld"}
    assert answers["pld"]["neighbouring_relation"] == "replace-special"


def test_discrete_noise_is_analysed_by_rdp_for_a_number_of_elements(dpshard):
    run = ["--steps", 100, "--sigma", 1]
    _, plain = ask(dpshard, *run, "--noise", "discrete-gaussian", "--elements", 1)
    _, answers = ask(dpshard, *run, "--noise", "discrete-gaussian", "--elements", 10**10)
    assert answers.keys() == {"rdp"}
    assert 1.005 < answers["rdp"]["epsilon"] / plain["rdp"]["epsilon"] < 1.05


def test_the_table_names_accountants_relation_and_caution(dpshard):
    output = dpshard("account", *MNIST, "--steps", 100, "--sigma", 1).stdout
    for word in ("pld", "rdp", "gdp", "under-state", "add-or-remove-one"):
        assert word in output


@pytest.mark.parametrize(
    "question",
    [["--steps", 100, "--sigma", 1], ["--steps", 100, "--epsilon", 1], ["--sigma", 1, "--epsilon", 1]],
)
def test_every_question_can_be_drawn(dpshard, tmp_path, question):
    picture = tmp_path / "new" / "account.png"
    chosen = ["--accountant", "rdp"] if "--epsilon" in question else ["--accountant", "rdp", "--accountant", "gdp"]
    dpshard("account", *MNIST, *question, *chosen, "--plot", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_budget_is_not_planned_by_an_approximation(dpshard):
    _, answers = ask(dpshard, "--steps", 100, "--epsilon", 1)
    assert answers.keys() == {"pld", "rdp"}
    message = dpshard("account", *MNIST, "--steps", 100, "--epsilon", 1, "--accountant", "gdp", exit_code=2).stderr
    assert "Take accountant='pld'" in " ".join(message.split())


def test_the_table_names_whose_figure_it_is(dpshard):
    run = ["account", "--sample-size", 1000, "--batch-size", 1000, "--steps", 100_000, "--sigma", 100, "--delta", 1e-18]
    assert "figure of rdp" in dpshard(*run, "--accountant", "pld").stdout


def test_a_search_over_settings_costs_its_worst(dpshard):
    run, also = ["--steps", 1000, "--sigma", 2, "--search-runs", 10], ["--search-also", "256x1000@1.1"]
    _, alone = ask(dpshard, *run)
    _, both = ask(dpshard, *run, *also)
    _, worst = ask(dpshard, "--steps", 1000, "--sigma", 1.1, "--search-runs", 10)
    assert alone["rdp"]["epsilon"] < both["rdp"]["epsilon"] == worst["rdp"]["epsilon"]
    said = " ".join(dpshard("account", *MNIST, *run, *also).stdout.split())
    assert "runs of 2 settings" in said


def test_a_budget_below_one_step_is_said(dpshard):
    question = [*MNIST, "--sigma", 0.5, "--epsilon", 0.01, "--accountant", "pld"]
    assert "not even one step fits" in dpshard("account", *question).stdout
    asked, answers = ask(dpshard, *question[len(MNIST) :])
    assert (asked, answers["pld"]["steps"]) == ("steps", 0)
    assert json.loads(dpshard("account", *question, "--json").stdout)["plan"]["phases"] == [[256, None]]


def test_a_curve_has_a_point_where_a_phase_ends_and_at_the_first_step(dpshard, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "save", lambda figure, path: drawn.append(figure.axes[0]))
    phases = ["--phases", "256x500,1024x100", "--sigma", 1]
    for accountants in (["gdp", "rdp"], ["rdp", "gdp"]):
        chosen = [x for name in accountants for x in ("--accountant", name)]
        run = dpshard("account", "--sample-size", 60000, *phases, *chosen, "--plot", tmp_path / "x.png")
        assert "x.png" in run.stderr
    curves = [{line.get_label(): line for line in ax.lines} for ax in drawn]
    assert {1, 500, 600} <= set(curves[0]["rdp"].get_xdata())
    assert curves[0]["rdp"].get_color() == curves[1]["rdp"].get_color() != curves[0]["gdp"].get_color()


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (["--steps", 100, "--sigma", -1], "noise_multiplier"),
        (["--steps", 100, "--epsilon", -1], "target_epsilon"),
        (["--steps", 100, "--epsilon", 0], "target_epsilon"),
        (["--steps", 100, "--sigma", 1, "--delta", 1.5], "target_delta"),
        (["--steps", 0, "--sigma", 1], "at least one step"),
        (["--steps", 100], "two of three"),
        (["--steps", 100, "--sigma", 1, "--epsilon", 1], "two of three"),
        (["--steps", 1, "--epochs", 1, "--sigma", 1], "exactly one"),
        (["--phases", "256x10", "--sigma", 1], "--phases"),
        (["--steps", 1, "--sigma", 1, "--accountant", "prv"], "prv"),
        (["--steps", 1, "--sigma", 1, "--max-batch-size", 300, "--accountant", "rdp"], "rdp"),
        (["--steps", 1, "--sigma", 1, "--noise", "discrete-gaussian"], "--elements"),
        (["--steps", 1, "--sigma", 1, "--elements", 9], "--noise discrete-gaussian"),
        (["--steps", 1, "--sigma", 1, "--noise", "laplace"], "laplace"),
        (["--steps", 1, "--sigma", 1, "--plot", "/dev/null/x.png"], "/dev/null/x.png"),
    ],
)
def test_a_bad_question_gets_one_line(dpshard, wrong, word):
    error = dpshard("account", *MNIST, *wrong, exit_code=2).stderr
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert word in error


@pytest.mark.parametrize(
    ("sample_size", "batch_size", "word"), [(0, 1, "empty"), (10, 20, "larger than the data set"), (10, 0, "positive")]
)
def test_impossible_sizes_get_one_line(dpshard, sample_size, batch_size, word):
    sizes = ["--sample-size", sample_size, "--batch-size", batch_size]
    for rest in (["--steps", 1, "--sigma", 1], ["--epsilon", 1, "--sigma", 1]):
        assert word in dpshard("account", *sizes, *rest, exit_code=2).stderr


BERT = "--sample-size 346000000 --steps 20000 --epsilon 5.36 --delta 2.89e-9".split()
INCREASING = "262144x1500,458752x1500,655360x1500,851968x1500,1048576x14000"
"""From 262K to 1M in steps of 196K over 7.5K steps."""


@pytest.mark.parametrize(
    ("batch_size", "accountant", "sigma"),
    [
        (65_536, "rdp", 0.5227),
        (2_097_152, "rdp", 1.2151),
        pytest.param(65_536, "pld", 0.4944, marks=pytest.mark.exhaustive),
        pytest.param(2_097_152, "pld", 1.1752, marks=pytest.mark.exhaustive),
    ],
)
def test_the_noise_of_dp_bert(dpshard, batch_size, accountant, sigma):
    """The setting of Anil et al. 2021, arXiv:2108.01624, Sec. 5."""
    question = ["account", *BERT, "--batch-size", batch_size, "--accountant", accountant, "--json"]
    (answer,) = json.loads(dpshard(*question).stdout)["answers"]
    assert round(answer["noise_multiplier"], 4) == sigma
    assert answer["epsilon"] <= 5.36


def test_the_schedule_of_dp_bert_saves_its_14_percent(dpshard):
    question = ["account", "--sample-size", 346_000_000, "--phases", INCREASING, *BERT[4:], "--accountant", "rdp"]
    assert "18,022,400,000 (52.1 epochs), 14.1% fewer than in 20,000 steps of 1,048,576" in dpshard(*question).stdout
    result = json.loads(dpshard(*question, "--json").stdout)
    assert result["plan"]["samples"] == 18_022_400_000
    assert round(result["answers"][0]["noise_multiplier"], 4) == 0.7965


def test_a_search_is_charged_by_rdp_alone(dpshard):
    run = ["--steps", 1000, "--sigma", 1.1]
    _, alone = ask(dpshard, *run)
    _, searched = ask(dpshard, *run, "--search-runs", 10)
    assert searched.keys() == {"rdp"}
    assert searched["rdp"]["epsilon"] > alone["rdp"]["epsilon"]
    assert "best of K such runs" in dpshard("account", *MNIST, *run, "--search-runs", 10).stdout
    _, calibrated = ask(dpshard, "--steps", 1000, "--epsilon", alone["rdp"]["epsilon"], "--search-runs", 10)
    assert calibrated["rdp"]["noise_multiplier"] > 1.3
    assert 0.999 * alone["rdp"]["epsilon"] < calibrated["rdp"]["epsilon"] <= alone["rdp"]["epsilon"]


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (["--search-runs", 10, "--accountant", "pld"], "accountant='rdp'"),
        (["--search-runs", 0.5], "--search-runs"),
        (["--search-runs", "inf"], "finite"),
        (["--search-distribution", "poisson"], "--search-runs"),
        (["--search-runs", 10, "--search-distribution", "uniform"], "uniform"),
        (["--search-runs", 10, "--max-batch-size", 300], "cap"),
    ],
)
def test_a_bad_search_gets_one_line(dpshard, wrong, word):
    error = dpshard("account", *MNIST, "--steps", 10, "--sigma", 1, *wrong, exit_code=2).stderr
    assert error.startswith("error: ")
    assert word in error


def test_correlated_noise_is_planned_and_compared_with_dp_sgd(dpshard):
    run = ["--steps", 60, "--epsilon", 8, "--accountant", "rdp"]
    ratios = {}
    for words in (
        "fixed-order --correlation banded-inverse --bands 16",
        "cyclic-poisson --correlation band-mf --bands 8",
    ):
        _, answers = ask(dpshard, *run, "--sampling", *words.split())
        assert answers["rdp"]["neighbouring_relation"] == "zero-out"
        assert 0.99 * 8 < answers["rdp"]["epsilon"] <= 8
        ratios[words.split()[0]] = answers["rdp"]["error_over_dp_sgd"]
    assert all(0.5 < ratio < 0.6 for ratio in ratios.values())
    assert ratios["fixed-order"] != ratios["cyclic-poisson"]
    _, answers = ask(dpshard, *run, "--sampling", "fixed-order")
    assert answers["rdp"]["error_over_dp_sgd"] > 1
    _, answers = ask(dpshard, *run)
    assert answers["rdp"]["error_over_dp_sgd"] is None


@pytest.mark.exhaustive
def test_balls_in_bins_are_whole_epochs_and_compared_with_dp_sgd(dpshard):
    """At low noise they need less of it; epochs have round(N / B) steps."""
    run = ["account", "--sample-size", 42_061, "--batch-size", 1024, "--epochs", 10, "--epsilon", 8, "--delta", 8e-6]
    (answer,) = json.loads(dpshard(*run, "--sampling", "balls-in-bins", "--json").stdout)["answers"]
    assert answer["steps"] == 410
    assert answer["accountant"] == "pld"
    assert answer["neighbouring_relation"] == "zero-out"
    assert answer["noise_multiplier"] == pytest.approx(0.6555, abs=2e-4)
    assert answer["error_over_dp_sgd"] == pytest.approx(0.960, abs=2e-3)
    planned = [*run[:-4], "--delta", 8e-6, "--sigma", answer["noise_multiplier"], "--sampling", "balls-in-bins"]
    assert "this sampling pays" in " ".join(dpshard(*planned).stdout.split())


@pytest.mark.exhaustive
def test_balls_in_bins_with_correlated_noise_name_their_simulation(dpshard):
    run = ["account", "--sample-size", 4000, "--batch-size", 100, "--epochs", 1, "--epsilon", 8, "--delta", 1e-6]
    words = "--correlation banded-inverse --bands 16 --sampling".split()
    (order,) = json.loads(dpshard(*run, *words, "fixed-order", "--json").stdout)["answers"]
    (bins,) = json.loads(dpshard(*run, *words, "balls-in-bins", "--json").stdout)["answers"]
    assert bins["error_over_dp_sgd"] < 0.85 * order["error_over_dp_sgd"]
    planned = [*run[:-4], "--delta", 1e-6, "--sigma", bins["noise_multiplier"]]
    said = " ".join(dpshard(*planned, *words, "balls-in-bins").stdout.split())
    assert "δ includes 1e-12 for its failure" in said
    assert "max_grad_norm, for all participations" in said
    assert "this noise pays" in said


def test_bands_are_chosen_for_the_budget(dpshard):
    """The best of a few: no worse than its neighbours."""
    run = "--steps 60 --epsilon 8 --accountant rdp --sampling fixed-order --correlation banded-inverse".split()
    chosen = json.loads(dpshard("account", *MNIST, *run, "--bands", "auto", "--json").stdout)
    bands = int(re.search(r"bands=(\d+)", chosen["plan"]["noise_correlation"]).group(1))
    assert 1 < bands <= 60
    for other in (bands // 2, min(60, 2 * bands)):
        _, others = ask(dpshard, *run, "--bands", other)
        assert chosen["answers"][0]["error_over_dp_sgd"] <= others["rdp"]["error_over_dp_sgd"] * (1 + 1e-9)


@pytest.mark.exhaustive
def test_three_epochs_at_a_small_epsilon_need_amplification(dpshard):
    run = "account --sample-size 200000 --batch-size 2048 --steps 293 --epsilon 1 --delta 1e-6 --accountant pld".split()
    inverse = "--sampling fixed-order --correlation banded-inverse --bands 64".split()
    said = " ".join(dpshard(*run, *inverse).stdout.split())
    assert "1.683 of that of DP-SGD" in said
    assert "take --sampling poisson, which has less noise, or try cyclic-poisson with band-mf" in said
    said = " ".join(dpshard(*run, *"--sampling cyclic-poisson --correlation band-mf --bands 4".split()).stdout.split())
    assert "0.864 of that of DP-SGD" in said
    assert "this noise pays" in said


def test_weights_are_optimised_for_momentum(dpshard):
    run = "--steps 60 --epsilon 8 --accountant rdp --sampling fixed-order --correlation banded-inverse".split()
    ratios = [
        ask(dpshard, *run, "--bands", 4, *(["--correlation-momentum", m] if m is not None else []))[1]["rdp"]
        for m in (None, 0, 0.9)
    ]
    default, prefix, momentum = (answer["error_over_dp_sgd"] for answer in ratios)
    assert momentum < prefix < default
    said = dpshard("account", *MNIST, *run, "--bands", "auto", "--correlation-momentum", 0.9).stdout
    assert "Noise in a model under momentum 0.9" in " ".join(said.split())


@pytest.mark.parametrize(("epsilon", "advice"), [(8, "this noise pays"), (0.1, "take --sampling poisson")])
def test_the_table_says_whether_correlation_pays(dpshard, epsilon, advice):
    words = "--epochs 3 --accountant rdp --sampling fixed-order --correlation banded-inverse --bands 8".split()
    output = dpshard("account", *MNIST, *words, "--epsilon", epsilon).stdout
    assert advice in " ".join(output.split())
    assert "(fixed-order)" in output
    assert "max_grad_norm" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--steps 9 --sigma 1 --correlation band-mf --bands 4", "cannot be analysed under sampling='poisson'"),
        ("--steps 9 --sigma 1 --sampling fixed-order --bands 4", "go together"),
        ("--steps 9 --sigma 1 --correlation-momentum 0.9", "is for correlated noise"),
        ("--steps 9 --sigma 1 --sampling cyclic-poisson", "needs BandMF"),
        ("--steps 9 --sigma 1 --sampling fixed-order --max-batch-size 300", "not analysed with a cap"),
        ("--epsilon 2 --sigma 1 --sampling fixed-order", "known length"),
        ("--steps 9 --sigma 1 --sampling shuffled", "choose one of"),
        ("--steps 9 --sigma 1 --sampling balls-in-bins --correlation band-mf --bands 2 --accountant rdp", "='pld'"),
        ("--steps 9 --sigma 1 --sampling balls-in-bins --accountant rdp", "accountant='pld'"),
        ("--steps 9 --sigma 1 --sampling fixed-order --correlation band-mf --bands auto", "give --target-epsilon"),
        ("--steps 9 --sigma 1 --sampling fixed-order --correlation band-mf --bands some", "give a number of bands"),
        ("--steps 9 --sigma 1 --sampling fixed-order --correlation banded-inverse --bands 10", "at most 9 bands"),
    ],
)
def test_correlations_that_are_not_analysed_are_refused(dpshard, words, message):
    assert message in " ".join(dpshard("account", *MNIST, *words.split(), exit_code=2).stderr.split())


def test_units_of_several_samples(dpshard):
    """Drawn sample by sample; epsilon is of units, and the output says so."""
    run = ["account", "--sample-size", 1000, "--batch-size", 200, "--steps", 3, "--delta", 1e-4, "--sigma", 4]
    several = json.loads(dpshard(*run, "--max-rows-per-unit", 4, "--json").stdout)
    (answer,) = several["answers"]
    assert several["plan"]["max_rows_per_unit"] == 4
    assert answer["accountant"] == "pld"
    assert answer["epsilon"] > 2 * json.loads(dpshard(*run, "--json").stdout)["answers"][0]["epsilon"]
    said = dpshard(*run, "--max-rows-per-unit", 4).stdout
    assert "all samples of one unit, at most 4" in " ".join(said.split())
    wrong = [*run, "--max-rows-per-unit", 4, "--sampling", "fixed-order"]
    assert "max_rows_per_unit" in dpshard(*wrong, exit_code=2).stderr


def test_all_samples_of_a_unit_are_in_a_release_before_the_run(dpshard):
    run = ["account", "--sample-size", 1000, "--batch-size", 200, "--steps", 3, "--delta", 1e-4, "--sigma", 40]
    alone = compute_epsilon(((Release(5.0 / 4, 1.0, 1000), 1),), 1e-4)
    (answer,) = json.loads(dpshard(*run, "--max-rows-per-unit", 4, "--earlier", 5, "--json").stdout)["answers"]
    assert alone < answer["epsilon"] < 1.1 * alone


@pytest.mark.parametrize(
    "kind", [(), ("--sampling", "fixed-order"), ("--noise", "discrete-gaussian", "--elements", 10**14)]
)
def test_the_settings_of_a_search_have_one_sampling_and_noise(dpshard, kind):
    run = ["account", "--sample-size", 10000, "--accountant", "rdp", "--search-runs", 5, "--json", *kind]
    first, second = (
        json.loads(dpshard(*run, "--phases", "500x100", "--sigma", one, "--search-also", f"500x100@{other}").stdout)
        for one, other in ((2, 20), (20, 2))
    )
    assert first["answers"][0]["epsilon"] == second["answers"][0]["epsilon"]
