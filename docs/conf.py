"""Settings of the documentation site, which `make docs` builds with Sphinx.

The sources begin at the root of the repository, so that links from a page to a benchmark or an example lead the same
way on the site as in the repository.
"""

import sys
from pathlib import Path

import equipoise

sys.path.insert(0, str(Path(__file__).parent / "_site"))

# The project

project = "Equipoise"
author = "The Equipoise contributors"
release = version = equipoise.__version__
copyright = author

# Pages

extensions = [
    "accessible",
    "contents",
    "repository_links",
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
root_doc = "docs/index"
source_suffix = {".md": "markdown"}
include_patterns = [
    "docs/**",
    "CHANGELOG.md",
    "CODE_OF_CONDUCT.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/README.md",
    "benchmarks/*/README.md",
    "examples/*/README.md",
    "tests/simulated/README.md",
]
exclude_patterns = [
    ".*",
    "**/.*",
    "docs/_build",
    "docs/_site",
    "equipoise",
    "outputs",
    "multirun",
    "**/outputs",
]
# Anchors of headings are those of a forge.
myst_heading_anchors = 4

# The reference. Docstrings put code between single backticks.

default_role = "code"
# Dashes only: quotes stand around values of Python.
smartquotes_action = "D"
toc_object_entries_show_parents = "hide"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 100
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
# Only the public names of the package have entries here, not those of other projects or of inner modules.
nitpick_ignore_regex = [("py:.*", r"(?!equipoise\.\w+$).*")]

# The look

html_theme = "furo"
html_title = "Equipoise"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_logo = html_favicon = "_static/logo.svg"
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#0b6b8a",
        "color-brand-content": "#0b6b8a",
    },
    "dark_css_variables": {
        "color-brand-primary": "#5cc8e8",
        "color-brand-content": "#5cc8e8",
    },
}
# The first page of the site, which leads to the one below docs/.
html_extra_path = ["_site/index.html"]
html_copy_source = False
html_show_sphinx = False
copybutton_prompt_text = ">>> "
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "github-dark"
