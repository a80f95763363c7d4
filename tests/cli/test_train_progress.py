"""What `relaxion train` shows of alarms: the newest in the bar, each as a line on stderr (R9)."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from relaxion.apps.cli.train import NewestAlarm, alarms_as_sentences, progress
from relaxion.train.diagnostics import DIAGNOSIS
from relaxion.train.tasks.settings import read_settings

WALL, CRITIC = "diagnosis/alarm_wall", "diagnosis/alarm_overestimation"


def test_the_alarm_that_began_last_is_shown_while_it_stands():
    newest = NewestAlarm()
    assert newest({}) == []
    assert newest({WALL: 0.0, CRITIC: 1.0}) == ["! critic overestimates"]
    assert newest({WALL: 1.0, CRITIC: 1.0}) == ["! blocked against a wall"]
    assert newest({WALL: 1.0, CRITIC: 1.0}) == ["! blocked against a wall"]
    assert newest({WALL: 0.0, CRITIC: 1.0}) == ["! critic overestimates"]
    assert newest({WALL: 0.0, CRITIC: 0.0}) == []


def test_advice_is_not_in_the_bar():
    assert NewestAlarm()({"diagnosis/advice_worse_than_bfgs": 1.0}) == []


def test_the_bar_says_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes the stream for a terminal
    monkeypatch.setenv("COLUMNS", "200")
    settings = read_settings({"task": "relax", "structures": "b2:AlCu", "steps": 100})
    with progress(settings, Path("out"), quiet=False) as report:
        assert report is not None
        report(100, {WALL: 1.0, "eval/force_calls_mean": 7.2, "eval/force_calls_bfgs": 9.1})
    shown = capsys.readouterr()
    assert "force calls 7.2, BFGS 9.1, ! blocked against a wall" in shown.err
    assert shown.out == ""


def test_each_alarm_is_a_line_on_stderr(capsys: pytest.CaptureFixture[str]):
    log = logging.getLogger(DIAGNOSIS)
    with alarms_as_sentences():
        log.warning("step %d: %s", 80, "blocked against a wall: …")
        log.info("advice stays in alarms.jsonl")
    assert capsys.readouterr().err == "relaxion: alarm: step 80: blocked against a wall: …\n"
    assert log.handlers == []
    assert log.propagate


def test_where_nobody_watches_there_is_a_line_for_each_interval(capsys: pytest.CaptureFixture[str]):
    settings = read_settings({"task": "relax", "structures": "b2:AlCu", "steps": 100, "log_interval_steps": 50})
    with progress(settings, Path("out"), quiet=False) as report:
        assert report is not None
        for step in (30, 60, 90, 120):
            report(step, {"eval/force_calls_mean": 7.2})
    assert capsys.readouterr().err == "out: step 60 of 100, force calls 7.2\nout: step 120 of 100, force calls 7.2\n"
    with progress(settings, Path("out"), quiet=True) as report:
        assert report is None
