"""`relaxion report RUN`: what the page of a training run says, that it is what the run wrote, and what is missing."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import relaxion as package
from relaxion.apps.report.page import LARGEST_BYTES, as_data_block
from relaxion.apps.report.run import Curve, watched
from relaxion.apps.report.training import training_page, training_report
from relaxion.train.diagnostics import DIAGNOSTICS
from training_runs import ATOMS, PENDULUM, train_small

HOSTILE = "</script><script>window.hacked = 1</script>"


@pytest.fixture(scope="module")
def atom_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_small(ATOMS, tmp_path_factory.mktemp("runs") / "atoms")


@pytest.fixture(scope="module")
def vector_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_small(PENDULUM, tmp_path_factory.mktemp("runs") / "pendulum")


@pytest.fixture
def copied(atom_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(atom_run, tmp_path / "copy"))


def parts(run: Path) -> dict[str, dict]:
    return {part["id"]: part for part in training_report(run).parts}


def read_json(run: Path, name: str) -> dict:
    return json.loads((run / name).read_text())


def test_curves_are_what_assessments_found_beside_bfgs_and_fire(atom_run: Path) -> None:
    lines = [json.loads(line) for line in (atom_run / "metrics.jsonl").read_text().splitlines()]
    assessed = [line for line in lines if "eval/force_calls_mean" in line]
    curve = parts(atom_run)["curve"]
    assert curve["series"][0]["x"] == [line["time/total_timesteps"] for line in assessed]
    assert curve["series"][0]["y"] == pytest.approx([line["eval/force_calls_mean"] for line in assessed], rel=1e-4)
    result = read_json(atom_run, "result.json")
    assert [limit["value"] for limit in curve["limits"]] == [result["force_calls_bfgs"], result["force_calls_fire"]]
    assert [limit["label"].split()[0] for limit in curve["limits"]] == ["BFGS", "FIRE"]
    success = parts(atom_run)["success"]["series"][0]["y"]
    assert success[-1] == pytest.approx(100 * result["final_success_rate"], rel=1e-4)


def test_every_diagnostic_has_its_tile_with_healthy_range_and_alarm(atom_run: Path) -> None:
    lines = [json.loads(line) for line in (atom_run / "metrics.jsonl").read_text().splitlines()]
    logged = {name for line in lines for name, value in line.items() if value is not None}
    gauges = {gauge["name"]: gauge for gauge in parts(atom_run)["diagnosis-0"]["gauges"]}
    assert set(gauges) == {f"diagnosis/{one.name}" for one in DIAGNOSTICS if f"diagnosis/{one.name}" in logged}
    for one in DIAGNOSTICS:
        if f"diagnosis/{one.name}" in gauges:
            assert gauges[f"diagnosis/{one.name}"]["summary"] == f"healthy: {one.healthy}"
    said = {name: " ".join(gauge["more"]) for name, gauge in gauges.items()}
    assert "blocked against a wall" in said["diagnosis/blocked_share"]
    assert "What to do: check minimum_distance_angstrom" in said["diagnosis/blocked_share"]
    assert "the potential fails" in said["diagnosis/outcome_non_finite"]
    assert {"train/critic_loss", "train/policy_gradient_norm"} <= {
        gauge["name"] for gauge in parts(atom_run)["agent-0"]["gauges"]
    }


def test_every_diagnostic_has_a_verdict(atom_run: Path) -> None:
    (run,) = watched([atom_run])
    run.poll()

    def verdict(name: str, *values: float) -> tuple[str, str]:
        """Of these values, and no alarm."""
        curve = run.history.curves[f"diagnosis/{name}"] = Curve()
        for step, value in enumerate(values):
            curve.add(step, value)
        (found,) = (one for one in training_page([run]).parts if one["id"] == "diagnosis-0")
        gauge = next(one for one in found["gauges"] if one["name"] == f"diagnosis/{name}")
        return gauge["verdict"], gauge["tone"]

    assert verdict("policy_move_angstrom", 0.2) == ("healthy", "good")
    assert verdict("policy_move_angstrom", 0.7) == ("outside its range", "warn")
    assert verdict("back_off", 0.2) == ("outside its range", "warn")
    distance = run.settings["minimum_distance_angstrom"]
    assert verdict("closest_pair_angstrom", distance + 0.1) == ("healthy", "good")
    assert verdict("closest_pair_angstrom", distance - 0.1) == ("outside its range", "warn")
    assert verdict("gate_factor", 0.5) == ("healthy", "good")
    assert verdict("returns_outside_support", 0.0) == ("healthy", "good")
    assert verdict("returns_outside_support", 0.01) == ("outside its range", "warn")
    assert verdict("assessed_calls_beside_bfgs", 2.0) == ("not yet", "")
    assert verdict("largest_force_ev_per_angstrom", 3.0, 2.0, 1.0) == ("falling", "good")
    assert verdict("return_from_start", 3.0, 2.0, 1.0) == ("falling", "warn")
    assert verdict("return_from_start", 1.0, 1.0, 1.0) == ("level", "")
    assert verdict("q_at_start", 1.0) == ("no alarm", "good")
    assert verdict("entropy_bonus", 1.0) == ("no verdict", "")
    for outcome in ("step_limit", "stalled", "blocked", "non_finite"):
        verdict(f"outcome_{outcome}", 0.0)
    assert verdict("outcome_converged", 9.0) == ("healthy", "good")
    assert verdict("outcome_blocked", 9.0) == ("healthy", "good"), "half of them"
    assert verdict("outcome_blocked", 10.0) == ("outside its range", "warn")


def test_an_alarm_that_stands_is_said_where_its_number_is(copied: Path) -> None:
    sentence = f"blocked against a wall: moves are undone {HOSTILE}"
    event = {"step": 64, "alarm": "wall", "event": "begins", "sentence": sentence}
    (copied / "alarms.jsonl").write_text(json.dumps(event) + "\n")
    found = parts(copied)
    (gauge,) = (one for one in found["diagnosis-0"]["gauges"] if one["name"] == "diagnosis/blocked_share")
    assert (gauge["verdict"], gauge["tone"], gauge["alarm"]) == ("alarm", "bad", sentence)
    assert found["diagnosis-0"]["gauges"][0] == gauge, "alarms come first"
    assert found["alarms"]["alarms"][0]["sentence"] == sentence
    assert found["alarms"]["alarms"][0]["target"] == "diagnosis-0-diagnosis/blocked_share"
    (tile,) = (one for one in found["tiles"]["tiles"] if one["label"] == "Alarms")
    assert (tile["value"], tile["tone"], tile["note"]) == ("1", "bad", "wall")
    html = training_report(copied).html
    assert HOSTILE not in html
    assert as_data_block(sentence)[1:-1] in html


def test_structures_one_by_one(atom_run: Path) -> None:
    found, record, baselines = (
        parts(atom_run),
        read_json(atom_run, "assessment.json"),
        read_json(atom_run, "baselines.json"),
    )
    bfgs, fire = found["scatter-0"]["series"]
    assert bfgs["y"] == fire["y"] == record["structures"]["force_calls"]
    assert (bfgs["x"], fire["x"]) == (baselines["BFGS"]["force_calls"], baselines["FIRE"]["force_calls"])
    table = found["scatter-0"]["table"]
    assert [column["label"] for column in table["columns"]] == ["Structure", "Atoms", "Policy", "BFGS", "FIRE"]
    assert len(table["rows"]) == 12
    energies = zip(record["structures"]["energy_ev"], baselines["BFGS"]["energy_ev"], strict=True)
    both = [(a, b) for a, b in energies if a is not None and b is not None]
    assert len(found["parity-0"]["series"][0]["x"]) == len(both)


def test_the_profile_is_dolan_and_mores(atom_run: Path) -> None:
    record, baselines = read_json(atom_run, "assessment.json"), read_json(atom_run, "baselines.json")
    costs = {"Policy": [c if o == "converged" else np.inf for c, o in zip(
        record["structures"]["force_calls"], record["structures"]["outcome"], strict=True)]}  # fmt: skip
    for name, row in baselines.items():
        costs[name] = [
            c if e is not None else np.inf for c, e in zip(row["force_calls"], row["energy_ev"], strict=True)
        ]
    fewest = np.min(list(costs.values()), axis=0)
    for series in parts(atom_run)["profile-0"]["series"]:
        share = float((np.array(costs[series["name"]]) <= fewest).mean())
        at_one = [y for x, y in zip(series["x"], series["y"], strict=True) if x == 1.0]
        assert max(at_one) == pytest.approx(share, abs=1e-5)


def test_the_ten_hardest_have_films_of_what_was_recorded(atom_run: Path) -> None:
    gallery, record = parts(atom_run)["worst-0"], read_json(atom_run, "assessment.json")
    assert len(gallery["films"]) == 10
    calls = [record["structures"]["force_calls"][film["place"]] for film in record["worst"]]
    assert calls == sorted(calls, reverse=True)
    for film, stored in zip(gallery["films"], record["worst"], strict=True):
        assert film["summary"].startswith(f"{record['structures']['force_calls'][stored['place']]} calls")
        assert "BFGS" in film["summary"]
        last = np.array(film["start"]) + np.array(film["shifts"][-1])
        assert last.tolist() == stored["positions_milliangstrom"][-1]
        assert len(film["species"]) == record["structures"]["n_atoms"][stored["place"]]


def test_settings_seed_command_and_notes(atom_run: Path) -> None:
    found = parts(atom_run)
    facts = {fact["label"]: fact["value"] for fact in found["facts-0"]["facts"]}
    assert facts["Seed"].startswith("0 ")
    assert facts["Command"] == read_json(atom_run, "assessment.json")["command"].replace("__main__.py", "relaxion")
    assert facts["Reproduce"] == f"relaxion train {atom_run}/settings.toml --out NEW"
    assert found["settings-0"]["text"] == (atom_run / "settings.toml").read_text()
    assert "notes-0" not in found


def test_a_vector_run_shows_returns(vector_run: Path) -> None:
    found, result = parts(vector_run), read_json(vector_run, "result.json")
    assert "curve" not in found
    assert found["returns"]["series"][0]["y"][-1] == pytest.approx(result["final_return_mean"], rel=1e-3)
    assert min(found["episodes-0"]["series"][0]["y"]) == pytest.approx(result["final_return_worst"], rel=1e-3)
    assert "no diagnostics" in found["alarms"]["none"]


def test_an_older_run_says_what_is_missing(copied: Path) -> None:
    (copied / "assessment.json").unlink()
    found = parts(copied)
    assert "assessment.json is missing" in found["notes-0"]["notes"][0]
    assert not {"profile-0", "scatter-0", "parity-0", "worst-0"} & set(found)
    assert len(found["curve"]["series"][0]["x"]) == 4  # the start and the end are assessed too


def test_baselines_of_an_older_version_leave_the_films(copied: Path) -> None:
    baselines = read_json(copied, "baselines.json")
    means = {name: {"mean_force_calls": row["mean_force_calls"]} for name, row in baselines.items()}
    (copied / "baselines.json").write_text(json.dumps(means))
    found = parts(copied)
    assert "single starts" in found["notes-0"]["notes"][0]
    assert len(found["worst-0"]["films"]) == 10
    assert "scatter-0" not in found


@pytest.mark.parametrize("damage", ["structures", "worst", "cap"])
def test_a_damaged_assessment_is_a_note(copied: Path, damage: str) -> None:
    record = read_json(copied, "assessment.json")
    record[damage] = "nonsense"
    (copied / "assessment.json").write_text(json.dumps(record))
    assert "damaged" in parts(copied)["notes-0"]["notes"][0]


def test_a_truncated_metrics_file_is_a_note(copied: Path) -> None:
    content = (copied / "metrics.jsonl").read_bytes()
    (copied / "metrics.jsonl").write_bytes(content[:-40])
    (copied / "result.json").unlink()
    (copied / ".lock").unlink()  # it names this process, which lives
    found = parts(copied)
    assert any("incomplete line" in note for note in found["notes-0"]["notes"])
    assert len(found["curve"]["series"][0]["x"]) == 3


def test_several_runs_share_their_curves(atom_run: Path, vector_run: Path, copied: Path) -> None:
    runs = watched([atom_run, copied, vector_run])
    for run in runs:
        run.poll()
    page = training_page(runs)
    found = {part["id"]: part for part in page.parts}
    assert [series["name"] for series in found["curve"]["series"]] == ["atoms", "copy"]
    assert found["returns"]["series"][0]["style"] == 2
    assert [row["cells"][0] for row in found["runs"]["rows"]] == ["atoms", "copy", "pendulum"]
    assert (found["worst-0"]["run"], found["worst-1"]["run"], found["facts-2"]["run"]) == (0, 1, 2)
    assert len(page.html.encode()) < LARGEST_BYTES


def test_the_page_is_small_and_self_contained(atom_run: Path, tmp_path: Path) -> None:
    page = package.report(atom_run)
    assert page.view() is page
    assert "srcdoc" in page._repr_html_()
    path = page.save(tmp_path / "page.html")
    assert path.stat().st_size < LARGEST_BYTES
    html = path.read_text()
    assert "default-src 'none'" in html
    assert "connect-src" not in html
    assert not re.search(r'(?:src|href)="(?!data:|#)', html)


def test_the_command(relaxion, atom_run: Path) -> None:
    answer = relaxion("report", str(atom_run), "--out", "page.html")
    assert answer.code == 0
    assert Path("page.html").exists()
    assert relaxion("report", str(atom_run), "--out", "page.html").code == 1
    assert relaxion("report", str(atom_run), "--out", "page.html", "--force").code == 0
