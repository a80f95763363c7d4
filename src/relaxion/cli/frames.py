"""All relaxed structures of one input in one file, beside the folders of each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from relaxion.bench.result_folder import write_frames
from relaxion.cli.sentences import Report
from relaxion.errors import FileError


def write_together(reports: Sequence[Report], out: Path, *, force: bool) -> list[str]:
    """One extxyz for each file of several structures; sentences about those that were not written."""
    said = []
    for name, relaxed in _by_file(reports).items():
        file = out / f"{name}.extxyz"
        if file.exists() and not force:
            said.append(f"{file} exists and was left as it is; --force replaces it")
            continue
        try:
            write_frames([report.run.final for report in relaxed if report.run and report.run.final], file)
        except FileError as error:
            said.append(str(error))
    return said


def _by_file(reports: Sequence[Report]) -> dict[str, list[Report]]:
    """By the name that the folders of a file share, in order; only files of several structures."""
    found: dict[str, list[Report]] = {}
    for report in reports:
        if report.job.index is not None and report.written_to is not None:
            found.setdefault(report.job.folder.rpartition("-")[0], []).append(report)
    return found
