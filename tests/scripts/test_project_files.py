"""Files that forges and tools read: forms, citation, versions of the checks before a commit."""

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from scripts.checks.sources import ROOT

FORMS = sorted(path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")


def read(name: str | Path) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def project() -> dict[str, Any]:
    return dict(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"])


def test_checks_before_a_commit_have_the_versions_of_constraints() -> None:
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    hooks = [hook for repository in read(".pre-commit-config.yaml")["repos"] for hook in repository["hooks"]]
    pinned = [requirement for hook in hooks for requirement in hook["additional_dependencies"]]
    assert {requirement.partition("==")[0] for requirement in pinned} == {"mypy", "ruff"}
    assert set(pinned) <= set(constraints)
    assert {hook["entry"].split()[0] for hook in hooks} == {"mypy", "ruff"}


def test_a_report_asks_for_what_the_documentation_says() -> None:
    fields = {field.get("id"): field for field in read(FORMS[0])["body"]}
    assert "equipoise doctor" in fields["doctor"]["attributes"]["label"]
    assert fields["doctor"]["validations"]["required"] is True
    offered = fields["strategy"]["attributes"]["options"]
    assert set(project()["entry-points"]["equipoise.strategies"]) <= set(offered)


def test_files_that_texts_name_exist() -> None:
    folder = ROOT / ".github"
    for path in (*folder.rglob("*.md"), *folder.glob("ISSUE_TEMPLATE/*.yml")):
        for name in re.findall(r"\b[\w/]+\.md\b", path.read_text(encoding="utf-8")):
            assert (ROOT / name).is_file(), f"{path.name} names {name}"


def test_the_citation_agrees_with_the_package() -> None:
    citation = read("CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert citation.keys() >= {"message", "title", "authors", "version", "license"}
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in project()["authors"]]
    assert citation["license"] == project()["license"]
    assert citation["keywords"] == project()["keywords"]
