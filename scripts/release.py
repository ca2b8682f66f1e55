"""Build sdist and wheel, check them, and try both in empty environments, with the oldest and the newest torch.

python -m scripts.release                what can be checked at any time; the archives lie in dist/
python -m scripts.release --final        also what holds for a release alone: a date, a tag, no changes that wait
python -m scripts.release --trials one   one empty environment: the wheel with the newest torch
python -m scripts.release --trials none  without empty environments, which download all dependencies

Exits with 1 if something is wrong. What is missing for a release only is a note without --final.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from scripts.checks.archives import sdist_faults, wheel_faults
from scripts.checks.metadata import metadata_faults
from scripts.checks.sources import ROOT, changelog_faults, changelog_notes, repository_files, version_faults, version_of
from scripts.checks.trial import extra_faults, extras, trial_faults

DIST = ROOT / "dist"


def build(folder: Path) -> tuple[Path, Path]:
    """Build the sdist from the checkout, and the wheel from the sdist, by the hatchling of this environment.

    Args:
        folder: Where the archives go. What lies there is removed.

    Returns:
        The sdist and the wheel.
    """
    shutil.rmtree(folder, ignore_errors=True)
    sdist_command = ["-m", "hatchling", "build", "--target", "sdist", "--directory", str(folder)]
    subprocess.run([sys.executable, *sdist_command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    (sdist,) = folder.glob("*.tar.gz")
    wheel_command = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([sys.executable, *wheel_command, "--wheel-dir", str(folder), str(sdist)], check=True)
    (wheel,) = folder.glob("*.whl")
    return sdist, wheel


def faults_of(sdist: Path, wheel: Path) -> list[str]:
    """Return what is wrong with the sources and the archives."""
    version = version_of(ROOT)
    files = repository_files(ROOT)
    return [
        *version_faults(ROOT),
        *changelog_faults(ROOT, version),
        *sdist_faults(sdist, version, files),
        *wheel_faults(wheel, files),
        *metadata_faults(wheel, version),
    ]


def notes_of() -> list[str]:
    """Return what is missing for a release, and need not be there between releases."""
    version = version_of(ROOT)
    notes = changelog_notes(ROOT, version)
    if _git("status", "--porcelain"):
        notes.append("git: the working tree has changes that are not committed")
    if f"v{version}" not in _git("tag", "--points-at", "HEAD").split():
        notes.append(f"git: this commit has no tag v{version}")
    return notes


def _trials(sdist: Path, wheel: Path, *, all_of_them: bool) -> list[str]:
    """Return what is wrong in empty environments. An environment is removed before the next one is made."""
    version = version_of(ROOT)
    archives = [(wheel, True)]
    groups = []
    if all_of_them:
        archives = [(wheel, False), (sdist, True)]
        groups = extras()
    faults = []
    for archive, newest in archives:
        with tempfile.TemporaryDirectory() as folder:
            faults += trial_faults(archive, version, Path(folder), newest=newest)
    for name in groups:
        with tempfile.TemporaryDirectory() as folder:
            faults += extra_faults(wheel, name, Path(folder))
    return faults


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--final", action="store_true", help="what is missing for a release is a fault")
    parser.add_argument(
        "--trials",
        choices=("all", "one", "none"),
        default="all",
        help="what is tried in empty environments (default: all)",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, check and report. Return the exit code."""
    options = parse(arguments)
    sdist, wheel = build(DIST)
    for archive in (sdist, wheel):
        print(f"built {archive.relative_to(ROOT)}, {archive.stat().st_size / 2**20:.1f} MiB", flush=True)
    faults = faults_of(sdist, wheel)
    notes = notes_of()
    if options.trials != "none":
        faults += _trials(sdist, wheel, all_of_them=options.trials == "all")
    if options.final:
        faults += notes
        notes = []
    for text in notes:
        print(f"note: {text}")
    for text in faults:
        print(f"fault: {text}")
    print(f"release: {len(faults)} faults, {len(notes)} notes")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
