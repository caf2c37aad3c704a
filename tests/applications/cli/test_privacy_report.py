"""`dpshard report`: one page that needs nothing else and says what a run has reported, less of it to the public."""

import html
import json
import re
import shutil
from html.parser import HTMLParser

import pytest
import yaml
from typer.testing import CliRunner

from dpshard.applications.cli import app
from dpshard.applications.cli.final_report import rows
from tests.applications.cli.conftest import QUICK, no_pictures

pytestmark = pytest.mark.usefixtures("coarse_losses")

VOID = {"meta", "br", "img", "link", "use", "path", "rect", "line", "hr"}


class Page(HTMLParser):
    """Checks that every element is closed, and collects what could lead elsewhere, ids, references and text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.names, self.links, self.ids, self.references, self.words = [], set(), [], [], set(), []
        self.feed(text)
        self.close()
        assert self.open == []
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        for name, value in attrs:
            if name in ("href", "src", "xlink:href", "action", "data"):
                self.links.append(value)
            if name == "id":
                self.ids.append(value)
            self.references |= set(re.findall(r"url\(#([^)]+)\)", value or ""))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "finished"
    with no_pictures():
        result = CliRunner().invoke(app, ["train", *QUICK, "--max-batch-size", "auto", "--out", str(folder)])
    assert result.exit_code == 0, result.output
    return folder


def written(dpshard, run, *flags):
    dpshard("report", run, *flags)
    return (run / ("report-public.html" if flags else "report.html")).read_text("utf-8")


def test_the_page_is_whole_and_leads_nowhere(dpshard, run):
    text = written(dpshard, run)
    page = Page(text)
    assert all(link.startswith("#") for link in page.links)
    assert not page.names & {"script", "link", "img", "iframe", "object", "base"}
    assert not re.search(r"@import|url\((?!#)", text)
    assert len(page.ids) == len(set(page.ids))
    assert {link[1:] for link in page.links} | page.references <= set(page.ids)
    assert page.text.count("Privacy report") == 2  # title and heading


def test_the_page_says_what_the_report_says(dpshard, run):
    text = Page(written(dpshard, run)).text
    privacy = json.loads((run / "report.json").read_text())["privacy"]
    assert privacy["statement"] in text
    assert "replace-special" in text
    assert "truncated Poisson, at most 112 samples per step" in text
    assert "Only model.pt is covered, and may be given away" in text
    assert "No attack was tried" in text


def test_the_command_on_the_page_gives_the_same_epsilon(dpshard, run):
    text = html.unescape(written(dpshard, run))
    command = re.search(r"^dpshard (account .*)$", text, re.MULTILINE)[1].split()
    answer = json.loads(dpshard(*command, "--json").stdout)
    epsilon = json.loads((run / "report.json").read_text())["privacy"]["epsilon"]
    assert answer["answers"][0]["epsilon"] == pytest.approx(epsilon, rel=1e-9)


@pytest.mark.parametrize("options", ["--correlation-momentum 0.5"])
def test_the_command_on_the_page_knows_the_sampling_and_the_correlation(dpshard, tmp_path, options):
    out = tmp_path / "run"
    correlated = f"--sampling fixed-order --correlation banded-inverse --bands 2 {options}".split()
    dpshard("train", "--steps", "4", "--batch-size", "400", "--evaluations", "1", *correlated, "--out", out)
    text = html.unescape(written(dpshard, out))
    command = re.search(r"^dpshard (account .*)$", text, re.MULTILINE)[1].split()
    answer = json.loads(dpshard(*command, "--json").stdout)
    epsilon = json.loads((out / "report.json").read_text())["privacy"]["epsilon"]
    assert answer["answers"][0]["epsilon"] == pytest.approx(epsilon, rel=1e-6)


def test_the_command_on_the_page_counts_private_bounds(dpshard, run, tmp_path):
    copy = tmp_path / "bounds"
    shutil.copytree(run, copy)
    report = json.loads((copy / "report.json").read_text())
    report["privacy"]["earlier"] = [[4.0, 1]]
    (copy / "report.json").write_text(json.dumps(report))
    command = re.search(r"^dpshard (account .*)$", html.unescape(written(dpshard, copy)), re.MULTILINE)[1].split()
    assert command[command.index("--earlier") + 1] == "4.0"
    epsilon = json.loads(dpshard(*command, "--json").stdout)["answers"][0]["epsilon"]
    assert epsilon > report["privacy"]["epsilon"]


def test_a_page_of_discrete_noise_says_so(dpshard, run, tmp_path):
    copy = tmp_path / "discrete"
    shutil.copytree(run, copy)
    report = json.loads((copy / "report.json").read_text())
    report["privacy"] |= {
        "noise": "discrete-gaussian",
        "discretized_elements": 77,
        "accountant": "rdp",
        "max_batch_size": None,
    }
    (copy / "report.json").write_text(json.dumps(report))
    text = html.unescape(written(dpshard, copy))
    assert "exact discrete Gaussian on a grid" in text
    command = re.search(r"^dpshard (account .* --noise discrete-gaussian --elements 77 .*)$", text, re.MULTILINE)[1]
    assert json.loads(dpshard(*command.split(), "--json").stdout)["plan"]["discretized_elements"] == 77


@pytest.mark.exhaustive
def test_the_audit_of_the_run_is_on_the_page(dpshard, run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    dpshard("audit", folder, "--trials", 40, "--steps-per-trial", 2, "--canaries", 50)
    figures = json.loads((folder / "audit.json").read_text())
    text = Page(written(dpshard, folder)).text
    assert "No attack was tried" not in text
    assert f"by {figures['by'] or 'not recorded'} on {figures['at'][:10]}: none proved more" in text
    assert "50 gradient canaries in 6 steps" in text
    assert "32 trials of 2 steps (Poisson samples, 1 of 2)" in text
    assert f"{figures['sampling']['accounted']:.2f}"[:-1] in text
    figures["run"]["refuted"] = True
    (folder / "audit.json").write_text(json.dumps(figures))
    assert "do not rely on this report" in written(dpshard, folder)


def test_a_page_for_the_public_holds_no_figures_of_the_data(dpshard, run):
    whole, public = written(dpshard, run), written(dpshard, run, "--public")
    for word in ("Validation accuracy", "clip fraction over", "held-out", "% right", "Gradient-SNR"):
        assert word not in Page(public).text.partition("To reproduce")[0]
    assert "not covered by epsilon" in whole
    assert "not covered by epsilon" not in public
    assert public.count("<svg") == 1  # epsilon over steps, which the schedule decides
    assert Page(public).text.count("Privacy report") == 2


def test_a_page_for_the_public_holds_no_names_of_files(dpshard, run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    settings = yaml.safe_load((folder / "config.yaml").read_text("utf-8"))
    long = "clinic of the " + 8 * "very long name " + "it's: jane-doe.csv"  # YAML breaks and quotes it
    files = {"task": "data", "data": long, "columns": "jane-doe.yaml"}
    (folder / "config.yaml").write_text(yaml.safe_dump({**settings, **files}))
    assert "jane-doe" in written(dpshard, folder)
    public = written(dpshard, folder, "--public")
    assert "jane-doe" not in public
    assert "very long" not in public


def test_a_search_has_another_report(dpshard, run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "search")
    (folder / "plan.json").touch()
    assert "dpshard tune" in dpshard("report", folder, exit_code=2).stderr


@pytest.mark.filterwarnings("ignore:noise_multiplier=0")
def test_an_unfinished_run_and_a_run_without_noise(dpshard, run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    (folder / "report.json").unlink()
    assert "has not finished" in dpshard("report", folder, exit_code=2).stderr
    dpshard("train", *QUICK, "--noise-multiplier", 0, "--out", tmp_path / "bare")
    assert "It is not private" in written(dpshard, tmp_path / "bare")


@pytest.mark.parametrize(
    ("name", "content", "remedy"),
    [
        ("report.json", b"{}", "--resume"),
        ("report.json", b"null", "--resume"),
        ("report.json", b"\xff", "--resume"),
        ("report.json", b'{"privacy": 3}', "--resume"),
        ("metrics.jsonl", b'{"step": 1, "epsilon": "much"}\n', "restore it"),
        ("audit.json", b"{}", "dpshard audit"),
        ("audit.json", b'{"step": 3}', "dpshard audit"),
        ("audit.json", b'{"run": {}}', "dpshard audit"),
        ("config.yaml", b"a: [", "config.yaml"),
    ],
)
def test_a_damaged_file_gets_one_line_that_says_how_to_mend_it(dpshard, run, tmp_path, name, content, remedy):
    folder = shutil.copytree(run, tmp_path / "run")
    (folder / name).write_bytes(content)
    error = dpshard("report", folder, exit_code=2).stderr
    assert error.startswith("error: ")
    assert f"{name} was damaged or edited" in error
    assert remedy in error


def test_a_damaged_report_is_written_again(dpshard, run, tmp_path):
    """As the error of a damaged one advises."""
    folder = shutil.copytree(run, tmp_path / "run")
    for name in ("report.json", "report.md"):
        (folder / name).unlink()
    dpshard("train", "--resume", folder)
    assert (folder / "report.json").read_text() == (run / "report.json").read_text()


def test_adaptive_thresholds_have_no_fixed_noise_on_the_page(dpshard, tmp_path):
    folder = tmp_path / "run"
    shown = dpshard("train", *QUICK, "--clipping-quantile", 0.5, "--out", folder).stdout
    assert "thresholds follow quantile 0.5" in " ".join(shown.replace("│", "").split())
    text = Page(written(dpshard, folder)).text
    assert "norm at most 1 at first; then thresholds follow quantile 0.5 of the norms" in text
    assert "standard deviation" not in text


@pytest.mark.parametrize(("sampling", "words"), [("cyclic-poisson", "a turn of a group"), ("fixed-order", "whole run")])
def test_the_noise_of_correlated_runs_is_told_by_the_sensitivity_that_it_has(sampling, words):
    facts = {"noise_multiplier": 2.0, "max_grad_norm": 1.0, "clipping_quantile": None, "max_batch_size": None}
    facts |= {"clipping_fn": "abadi", "clipping_style": "all-layer", "accountant": "pld", "earlier": [], "steps": 4}
    facts |= {"sampling": sampling, "sensitivity": 1.5, "noise_correlation": "BandMF(bands=3)", "noise": "gaussian"}
    facts |= {"epsilon": 1.0, "target_epsilon": None, "delta": 1e-5, "protected_unit": "one row"}
    facts |= {
        "neighbouring_relation": "zero-out",
        "sample_size": 90,
        "phases": [{"expected_batch_size": 9, "sampling_probability": None, "steps": 4}],
    }
    report = {"privacy": facts, "test": {"after": {}}, "samples": {"train": 90, "test": 0}, "parameters": 5}
    mechanism = dict(rows(report)[-1])
    assert f"{words}, 1.5 norms: standard deviation 3 on the independent vectors" in mechanism["noise"]
