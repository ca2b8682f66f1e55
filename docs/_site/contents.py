"""The table of contents: which page stands in which group.

The pages themselves are plain Markdown, which a forge shows as well. So the table is added to the first page when it is
read, instead of standing in it.
"""

from fnmatch import fnmatchcase

from sphinx.application import Sphinx

__all__ = ["CHILDREN", "GROUPS", "pages_below", "pages_by_group", "setup"]

# Names of pages, as paths in the repository without ".md"; `*` stands for all others of that form.
GROUPS = {
    "Tutorials": [
        "docs/start",
        "docs/first_project",
        "docs/eight_devices",
        "docs/examples",
    ],
    "How-to: move a program": [
        "docs/from_lightning",
        "docs/from_transformers",
        "docs/from_accelerate",
        "docs/from_data_parallel",
    ],
    "How-to: use devices": [
        "docs/data_parallel",
        "docs/ddp",
        "docs/fsdp",
        "docs/mesh",
        "docs/pipeline",
        "docs/several_machines",
        "docs/ray",
        "docs/ensemble",
        "docs/hogwild",
        "docs/virtual_devices",
    ],
    "How-to: save memory and time": [
        "docs/planning",
        "docs/memory",
        "docs/quantization",
        "docs/performance",
        "docs/compile",
        "docs/tuning",
        "docs/token_batches",
    ],
    "How-to: run and compare": [
        "docs/configuration",
        "docs/sweeps",
        "docs/runs",
        "docs/compare",
        "docs/checkpoints",
        "docs/export",
        "docs/verify",
        "docs/evaluation",
        "docs/optimizers",
        "docs/notebooks",
        "docs/troubleshooting",
        "docs/faq",
    ],
    "How-to: extend": ["docs/extending", "docs/writing_*"],
    "Reference": [
        "docs/reference/index",
        "docs/differences",
        "docs/glossary",
        "docs/stability",
        "CHANGELOG",
    ],
    "Explanation": [
        "docs/which_trainer",
        "docs/choosing",
        "docs/security",
    ],
    "For contributors": [
        "CONTRIBUTING",
        "docs/design",
        "docs/decisions/index",
        "docs/techniques/index",
        "docs/experiments",
        "benchmarks/README",
        "tests/simulated/README",
        "docs/private_names",
        "docs/releasing",
        "SECURITY",
        "CODE_OF_CONDUCT",
    ],
}

# Titles in the table, where that of the page is long or does not name what one searches for.
TITLES = {
    "docs/first_project": "A project of your own",
    "docs/data_parallel": "dp and balanced: replicas",
    "docs/ddp": "ddp: a process per device",
    "docs/fsdp": "fsdp: weights in shards",
    "docs/mesh": "meshes: cut layers, long sequences",
    "docs/pipeline": "pipeline: a model in stages",
    "docs/ensemble": "ensemble: several members",
    "docs/hogwild": "hogwild: shared weights",
    "docs/virtual_devices": "virtual: one result on any devices",
    "docs/evaluation": "Evaluations",
    "docs/several_machines": "Several machines",
    "docs/tuning": "Batch size and learning rate",
    "docs/reference/index": "All public names",
    "tests/simulated/README": "Simulated devices",
    "SECURITY": "Report a vulnerability",
}

# Pages below others.
CHILDREN = {
    "docs/examples": ["examples/*/README"],
    "docs/reference/index": [
        "docs/reference/trainer",
        "docs/reference/strategies",
        "docs/reference/callbacks",
        "docs/reference/functions",
        "docs/reference/data",
        "docs/reference/interfaces",
        "docs/reference/errors",
    ],
    "benchmarks/README": ["benchmarks/*/README"],
    "docs/techniques/index": ["docs/techniques/*"],
    "docs/decisions/index": ["docs/decisions/*"],
}


def pages_by_group(pages: set[str]) -> dict[str, list[str]]:
    """Return the pages of each group in their order, without those below others.

    Args:
        pages: All pages, as paths in the repository without ".md".
    """
    return {group: _matches(entries, pages) for group, entries in GROUPS.items()}


def pages_below(page: str, pages: set[str]) -> list[str]:
    """Return the pages below another one in their order.

    Args:
        page: The page that is their parent.
        pages: All pages.
    """
    others = pages - {page}
    return _matches(CHILDREN.get(page, []), others)


def _matches(entries: list[str], pages: set[str]) -> list[str]:
    """Return the pages that entries name, in the order of the entries."""
    found: list[str] = []
    for entry in entries:
        matching = sorted(page for page in pages if fnmatchcase(page, entry))
        found += [page for page in matching if page not in found]
    return found


def _add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Add the table to the text of the first page, and its parts to the pages that have others below them."""
    pages = set(app.env.found_docs)
    if page == app.config.root_doc:
        groups = pages_by_group(pages)
        source[0] += "".join(
            _directive(group, names) for group, names in groups.items() if names
        )
    elif page in CHILDREN:
        source[0] += _directive("", pages_below(page, pages))


def _directive(caption: str, pages: list[str]) -> str:
    lines = [
        "",
        "```{toctree}",
        ":hidden:",
        f":caption: {caption}" if caption else ":maxdepth: 1",
    ]
    for page in pages:
        lines.append(f"{TITLES[page]} </{page}>" if page in TITLES else f"/{page}")
    return "\n".join([*lines, "```", ""])


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the table when pages are read."""
    app.connect("source-read", _add_contents)
    return {"parallel_read_safe": True}
