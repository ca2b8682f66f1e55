"""Line and branch coverage by folder of the package, from the record of a campaign.

python benchmarks/mutations/by_folder.py                                  of this checkout
python benchmarks/mutations/by_folder.py --root ../later --output /tmp/later

Extensions are a folder each. Lines that run only in processes which are killed, or in slow tests, count as not covered.
"""

import argparse
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

from coverage import Coverage
from main import ROOT
from record import Record

COLUMNS = ("folder", "lines", "covered", "branches", "covered")


def counts_by_folder(package: Path, arcs: Mapping[str, set[tuple[int, int]]]) -> dict[str, Counter[str]]:
    """Count lines and branches, all and those that ran.

    Args:
        package: The folder of the package.
        arcs: For each of its files, all jumps from line to line that happened.
    """
    coverage = Coverage(data_file=None, branch=True, config_file=False)
    data = coverage.get_data()
    data.add_arcs({str(package / path): jumps for path, jumps in arcs.items()})
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for file in sorted(package.rglob("*.py")):
        path = file.relative_to(package)
        data.touch_file(str(file))
        _, statements, _, missing, _ = coverage.analysis2(str(file))
        branches = coverage.branch_stats(str(file)).values()
        counted = {
            "lines": len(statements),
            "lines covered": len(statements) - len(missing),
            "branches": sum(total for total, _ in branches),
            "branches covered": sum(taken for _, taken in branches),
        }
        depth = 2 if path.parts[0] == "extensions" else 1
        counts["/".join(path.parts[:-1][:depth]) or "files beside them"].update(counted)
    return dict(sorted(counts.items()))


def markdown(counts: Mapping[str, Counter[str]]) -> str:
    """Return the counts as a table, the whole package first."""
    whole: Counter[str] = Counter()
    for count in counts.values():
        whole.update(count)
    lines = [COLUMNS, ["---", "---:", "---:", "---:", "---:"]]
    for folder, count in {"all": whole, **counts}.items():
        if not count["lines"]:
            continue
        shares = [
            f"{100 * count[f'{kind} covered'] / count[kind]:.1f}%" if count[kind] else ""
            for kind in ("lines", "branches")
        ]
        lines.append([folder, f"{count['lines']:,}", shares[0], f"{count['branches']:,}", shares[1]])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout (default: this one)")
    parser.add_argument("--output", type=Path, default=ROOT / "outputs/mutations", help="the campaign's folder")
    options = parser.parse_args()
    package = options.root.resolve() / "equipoise"
    print(markdown(counts_by_folder(package, Record(options.output / "record").arcs)), end="")


if __name__ == "__main__":
    main()
