"""The report that is signed: page one answers a lay reader, everybody can read it."""

import hashlib
import html
import json
import math
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise, product
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dpshard.accounting import rounded_up
from dpshard.applications.cli import app, privacy_report
from tests.applications.cli.conftest import QUICK, no_pictures

pytestmark = pytest.mark.usefixtures("coarse_losses")

CLI = Path(privacy_report.__file__).parent
MORE = "--max-batch-size auto --clipping-quantile 0.5".split()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "finished"
    with no_pictures():
        result = CliRunner().invoke(app, ["train", *QUICK, *MORE, "--out", str(folder)])
    assert result.exit_code == 0, result.output
    found = {"noise_multiplier": 1.0, "trials": 40, "steps": 1, "lower_bound": 0.5, "accounted": 4.0}
    found |= {"confidence": 0.95, "delta": 1e-5, "refuted": False}
    told = {"at": "2026-11-24T23:59:00+00:00", "by": "Eve"}
    (folder / "audit.json").write_text(json.dumps({"step": found, "noise": found} | told))
    return folder


def written(dpshard, run, *flags, name="report.html"):
    dpshard("report", run, *flags)
    return (run / name).read_text("utf-8")


class Text(HTMLParser):
    """Text of a page outside of styles, pictures, programs and words that are marked as English."""

    def __init__(self, page, *, aside=("style", "svg", "pre")):
        super().__init__()
        self.aside, self.open, self.parts, self.alone, self.tables = aside, [], [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.alone += [values[name] for name in ("aria-label", "alt", "title") if name in values]
        if tag == "table":
            self.tables.append([])
        if tag == "th":
            self.tables[-1].append(values.get("scope"))
        if tag not in ("meta", "br", "path", "use", "rect", "image", "link"):
            hidden = tag in self.aside or (values.get("lang") == "en" and tag != "html")
            self.open.append((tag, hidden))

    def handle_endtag(self, tag):
        while self.open and self.open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        if not any(hidden for _, hidden in self.open):
            self.parts.append(data)


def spoken(page):
    return " ".join(" ".join(Text(page).parts).split())


def page_one(page):
    return spoken(page.partition('<section id="technical">')[0].partition("<body>")[2])


# --- page one -------------------------------------------------------------------------------------------------------


QUESTIONS = {
    "Which file is this about?": r"model\.pt, SHA-256 {model}",
    "Is a person protected, or a record?": "One record: one handwritten digit, one of 1,258",
    "What if one person has two rows?": r"several rows \(or other records\), read ε times their number \(two rows: ",
    "Is that strong?": r"Privacy loss ε = [\d.]+: (strong|reasonable|weak) protection\. The smaller the number",
    "Who made the scale?": "Scale: Ponomareva et al. 2023, How to DP-fy ML",
    "What is the exception?": r"Exception δ = 0\.00001 \(1 in 100,000\): for each record",
    "What is the worst for one person?": r"Belief afterwards: 50% \(1 to 1\) [\d.]+% \([\d.,]+ to 1\)",
    "And if it was hardly suspected?": r"only 10%\. Belief afterwards: 10% \(1 to 9\) [\d.]+% \(1 to [\d.]+\)",
    "How often is it so bad?": r"For any one record, in at least 95 of 100 trainings, a belief of 50% becomes",
    "Can it fail?": r"exception, for each record: with a probability of at most 0\.0001 \(1 in 10,000, ten times δ\)",
    "How many are concerned?": r"Among 1,258 records, that is at most 0\.2 on average",
    "Against whom?": "This attacker knows all other records, the whole method and the finished model",
    "Does it wear off with use?": "however often the model is used",
    "What may we publish?": r"Only model\.pt is covered, and may be given away",
    "Which data, and how do I check that?": r"1,258 records for training; .* Data fingerprint SHA-256 {data}",
    "What are the other held-out records for?": r"359 for the final test, 180 to watch the training \(nothing was",
    "Who did it, when, and with what?": r"Jane Doe When \(UTC\) \d{{4}}-\d\d-\d\d .* dpshard \d\.\d\.\d, torch",
    "Did somebody try to break it?": r"2 attacks of dpshard audit .*, by Eve on 2026-11-24: none proved more",
    "What are the attacks worth?": "This finds faults of the program; it does not prove protection",
    "Were trials counted?": "Each of them, also each trial, costs more privacy",
    "Are there other models?": "This report covers only this run",
    "Was something learned before?": "This run recorded none",
    "Is the model anonymous by law?": "Legal questions, such as whether the model is personal data",
    "How good is the model?": r"How good it is [\d.]+% right",
    "How do I check a file?": "compute its SHA-256: sha256sum FILE prints it",
    "With what do I compare it?": r'Compare it with "Model file" and "Data fingerprint" in the table "Who trained what',
    "How do I check the figure?": r"run the command dpshard account .* It must print ε = {epsilon}\.",
    "What if the run folder leaks?": "treat it as a leak of the data",
    "What if we train again?": "add its ε and its δ to those of this one",
    "What if a person withdraws?": r'does not forget the record\. The table "What may an attacker find out about one',
    "May I pass this on?": "Do not pass this report on",
    "Where do I sign, and what do the words mean?": "At the end: Words .* Signatures and purpose",
    "What if a check fails?": "do not use the model until the cause is found",
}


def test_page_one_answers_who_knows_nothing_of_privacy(dpshard, run):
    said = page_one(written(dpshard, run, "--by", "Jane Doe"))
    model = hashlib.sha256((run / "model.pt").read_bytes()).hexdigest()
    data = json.loads((run / "provenance.json").read_text())["data"]
    epsilon = rounded_up(json.loads((run / "report.json").read_text())["privacy"]["epsilon"])
    for question, answer in QUESTIONS.items():
        assert re.search(answer.format(model=model, data=data, epsilon=epsilon), said), f"{question}\n{said}"


def test_the_command_prints_the_epsilon_that_page_one_names(dpshard, run):
    page = html.unescape(written(dpshard, run))
    [command] = re.findall(r"^dpshard (account .*)$", page, re.MULTILINE)
    [epsilon] = re.findall(r"It must print ε = ([\d.]+)\.", page)
    assert epsilon in dpshard(*command.split()).stdout


def test_a_resumed_run_may_print_less(dpshard, run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    told = json.loads((folder / "provenance.json").read_text())
    told["starts"] *= 2
    (folder / "provenance.json").write_text(json.dumps(told))
    assert "or less if steps were repeated: this run was resumed" in page_one(written(dpshard, folder))


def test_figures_of_page_one_are_rounded_against_us():
    odds = privacy_report.odds({"epsilon": 3.0, "delta": 1e-5, "profile": [[1.0, 0.01]]})
    # (e + 0.01) / (1 + e) = 0.7338; e * 0.01 + 0.01 = 0.0372; 10/9 e^3 = 22.32, 1 / (1 + 9/10 e^-3) = 0.95712
    assert [privacy_report.of_100(odds[name]) for name in ("guess", "found")] == ["74 of 100", "4 of 100"]
    assert privacy_report.odds_after(odds["loss"], 0.5) == "95.8% (22.4 to 1)"
    # 22.32 / 9 = 2.4799, 2.4799 / 3.4799 = 0.71263
    assert privacy_report.odds_after(odds["loss"], 0.1) == "71.3% (2.5 to 1)"
    # The least of 1 - ln(1 - 0.01 / 0.05) = 1.22314 and 3 - ln(1 - 1e-5 / 0.05): odds of 3.39785
    assert [privacy_report.percent(odds[f"usual_{prior}"]) for prior in ("half", "tenth")] == ["77.3%", "27.5%"]
    assert [privacy_report.one_in(x) for x in (odds["rare"], 1e-5)] == ["10,000", "100,000"]
    assert privacy_report.short(1000 * odds["rare"], 1) == "0.1"


@pytest.mark.parametrize(
    ("odds", "shown"),
    [(1, "50.0% (1.0 to 1)"), (9, "90.0% (9.0 to 1)"), (0.55, "35.5% (1 to 1.8)"), (1e20, "100.0% (1.0e+20 to 1)")],
)
def test_odds_for_and_against(odds, shown):
    assert privacy_report.odds_after(math.log(odds), 0.5) == shown
    assert privacy_report.odds_after(math.log(9 * odds), 0.1) == shown


def test_two_records_of_a_person():
    # delta (1 + e^3) = 2.1086e-4; e^30 delta is beyond 1
    of_two = [privacy_report.odds({"epsilon": epsilon, "delta": 1e-5})["of_two"] for epsilon in (3.0, 30.0)]
    assert [privacy_report.short(delta, 2) for delta in of_two] == ["0.00022", "1"]
    assert (privacy_report.short(6.0), privacy_report.plain(1e-5)) == ("6", "0.00001")


@pytest.mark.parametrize("epsilon", [100.0003, 123.45111, 250.00011, 12345.6111])
def test_a_large_epsilon_is_not_rounded_down(epsilon):
    assert float(privacy_report.short(epsilon)) >= epsilon


@pytest.mark.parametrize(
    ("finished", "public", "shown"),
    [
        ("22:11:40", False, "2026-11-24 22:11, 35 seconds"),
        ("22:13:00", False, "2026-11-24 22:11 to 2026-11-24 22:13"),
        ("22:11:40", True, "2026-11-24 22:11"),
        ("22:12:01", True, "2026-11-24 22:11 to 2026-11-24 22:12"),
    ],
)
def test_one_time_is_not_printed_twice(finished, public, shown):
    started, finished = "2026-11-24T22:11:05+00:00", f"2026-11-24T{finished}+00:00"
    assert privacy_report.span(started, finished, public=public) == shown


def test_units_are_named_and_counted(dpshard, tmp_path):
    file, folder = tmp_path / "visits.csv", tmp_path / "run"
    file.write_text("\n".join(["patient,a,label", *(f"p{i % 20},{i % 7},{i % 2}" for i in range(60))]))
    options = "--group-column patient --rows-per-unit 2 --steps 2 --batch-size 4 --noise-multiplier 5".split()
    dpshard("train", "--data", file, *options, "--statistics-noise", 9, "--out", folder)
    said = page_one(written(dpshard, folder))
    assert "All records of one unit together: one patient, up to 2 rows in a step, one of 14 units" in said
    assert "Of a unit with more than 2 records, a step uses 2" in said
    assert "14 units for training, with all their records; held out: 12" in said
    assert "This run recorded bounds of columns" in said


@pytest.mark.parametrize(
    ("epsilon", "band", "place"),
    [(1.0, "strong", "33.3%"), (1.0001, "reasonable", "33.3%"), (10.0, "reasonable", "66.7%"), (10.1, "weak", "66.8%"),
     (0.0, "strong", "0.0%"), (1e9, "weak", "100.0%")],
)  # fmt: skip
def test_bands_of_the_scale(epsilon, band, place):
    assert privacy_report.strength(epsilon) == {"band": band, "place": place}


def test_what_identifies_stays_out_of_a_public_page(dpshard, run):
    folder = run.parent / "identifying"
    shutil.copytree(run, folder)
    told = json.loads((folder / "provenance.json").read_text())
    told["starts"][0]["by"] = "jdoe7"
    (folder / "provenance.json").write_text(json.dumps(told))
    whole, public = written(dpshard, folder), written(dpshard, folder, "--public", name="report-public.html")
    for secret in ("jdoe7", told["data"], "How good it is"):
        assert secret in whole
        assert secret not in public
    assert 'Compare it with "Model file" in the table' in page_one(public)
    assert "Jane Doe" in written(dpshard, folder, "--public", "--by", "Jane Doe", name="report-public.html")


def test_a_report_of_other_weights_is_refused(dpshard, run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    (folder / "model.pt").write_bytes(b"other")
    assert "model.pt is not the file that training wrote" in dpshard("report", folder, exit_code=2).stderr
    (folder / "model.pt").unlink()  # it was moved to where it is used
    assert json.loads((folder / "report.json").read_text())["model_sha256"] in written(dpshard, folder)


def test_a_run_from_before_has_a_page_too(dpshard, run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    report = json.loads((folder / "report.json").read_text())
    del report["privacy"]["profile"], report["model_sha256"]
    (folder / "report.json").write_text(json.dumps(report))
    (folder / "provenance.json").unlink()
    text = spoken(written(dpshard, folder))
    assert "the run recorded no privacy profile" in text
    assert "When (UTC) not recorded" in text
    assert "Code not recorded How" in text


@pytest.mark.parametrize("content", [b"[]", b"\xff", b'{"starts": [{}]}', b'{"finished": 3}'])
def test_damaged_provenance(dpshard, run, tmp_path, content):
    folder = shutil.copytree(run, tmp_path / "run")
    (folder / "provenance.json").write_bytes(content)
    assert "provenance.json was damaged or edited" in dpshard("report", folder, exit_code=2).stderr


# --- who trained on what --------------------------------------------------------------------------------------------


def test_a_resumed_run_reads_the_same_data(dpshard, tmp_path):
    file, folder = tmp_path / "table.csv", tmp_path / "run"
    rows = [f"{i % 7},{i % 5},{i % 2}" for i in range(60)]
    file.write_text("\n".join(["a,b,label", *rows]))
    options = "--steps 2 --batch-size 8 --noise-multiplier 1 --statistics-noise 5 --checkpoint-every 1".split()
    dpshard("train", "--data", file, *options, "--out", folder)
    told = json.loads((folder / "provenance.json").read_text())
    assert told["data"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert (folder / "provenance.json").stat().st_mode & 0o077 == 0
    (folder / "report.md").unlink()
    dpshard("train", "--resume", folder)
    again = json.loads((folder / "provenance.json").read_text())
    assert len(again["starts"]) == 2
    assert (again["data"], again["finished"]) == (told["data"], told["finished"])
    file.write_text("\n".join(["a,b,label", *reversed(rows)]))
    (folder / "report.md").unlink()
    assert "has changed since the run started" in dpshard("train", "--resume", folder, exit_code=2).stderr


def test_commit_of_the_repository(tmp_path, monkeypatch):
    from dpshard.applications.cli.provenance import commit

    assert commit(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    (tmp_path / "a.py").write_text("1")
    for command in (["init", "-q"], ["add", "a.py"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    first = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert commit(tmp_path) == first
    (tmp_path / "a.py").write_text("2")
    assert commit(tmp_path) == f"{first} + changes"
    monkeypatch.setenv("PATH", "")
    assert commit(tmp_path) is None


# --- everybody can read it ------------------------------------------------------------------------------------------


def luminance(colour):
    """Relative luminance by WCAG 2.2."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_contrast_is_computed_as_wcag_says():
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)  # the well-known grey that just fails


def test_every_text_has_contrast_in_light_and_dark():
    styles = (CLI / "report.css").read_text("utf-8")
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block))
        for block in re.findall(r":root \{(.*?)\}", styles, re.DOTALL)
    )
    assert light.keys() == dark.keys()
    pairs = [
        *product(("ink", "soft", "accent", "alarm"), ("paper",)),
        *product(("ink", "soft"), ("pale",)),
        ("alarm", "alarm-pale"),
        *product(("on-band",), ("strong", "reasonable", "weak")),
    ]
    for colours, (text, ground) in product((light, dark), pairs):
        assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground, colours)
    used = set(re.findall(r"(?<![-\w])color: var\(--([\w-]+)\)", styles))
    assert used <= {text for text, _ in pairs}
    assert set(re.findall(r"background: var\(--([\w-]+)\)", styles)) <= {ground for _, ground in pairs} | {"desk"}


def test_pictures_have_words_and_tables_have_headers(dpshard, run):
    page = written(dpshard, run)
    text = Text(page)
    assert page.count('role="img"') == len(text.alone) > 3
    assert all(len(words) > 10 for words in text.alone)
    assert page.count("<svg") == page.count('<svg role="img" aria-label="')
    assert len(text.tables) >= 7
    assert all(headers and set(headers) <= {"row", "col"} for headers in text.tables)
    levels = [int(level) for level in re.findall(r"<h(\d)", page)]
    assert levels[0] == 1
    assert all(later <= earlier + 1 for earlier, later in pairwise(levels))


# --- paper ----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.exhaustive
def test_a_pdf_with_one_page_for_everybody(dpshard, run):
    weasyprint = pytest.importorskip("weasyprint", exc_type=(ImportError, OSError))
    shown = dpshard("report", run, "--pdf").stdout.split()
    assert shown == [str(run / "report.html"), str(run / "report.pdf")]
    assert (run / "report.pdf").read_bytes().startswith(b"%PDF-1.")
    assert (run / "report.pdf").stat().st_mode & 0o077 == 0
    pages = weasyprint.HTML(filename=str(run / "report.html")).render().pages
    where = {anchor: number for number, page in reversed([*enumerate(pages, 1)]) for anchor in page.anchors}
    assert (where["page-one"], where["technical"]) == (1, 2)
    assert where["glossary"] == where["signatures"] == len(pages)


def test_a_pdf_without_weasyprint(dpshard, run, monkeypatch):
    monkeypatch.setitem(sys.modules, "weasyprint", None)
    assert "pip install 'dpshard[pdf]'" in dpshard("report", run, "--pdf", exit_code=2).stderr
