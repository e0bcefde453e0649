"""How the documentation is built; needs no network."""

import sys
from pathlib import Path

import celery_distlock

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "celery-distlock"
author = "celery-distlock contributors"
copyright = f"2026, {author}"  # noqa: A001
version = release = celery_distlock.__version__
html_title = f"{project} {release}"
html_theme = "furo"
html_copy_source = False
html_theme_options = {
    "source_repository": "https://github.com/celery-distlock/celery-distlock/",
    "source_branch": "main",
    "source_directory": "docs/",
}

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "from_code",
]
exclude_patterns = ["_ext", "pictures"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

default_role = "literal"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_custom_sections = [("Options", "params_style")]
napoleon_use_ivar = True

copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True

# What is not described here: other projects, the standard library beyond what Sphinx knows, and
# what the pages of the reference leave out because it is not for users.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(asyncio|celery|kombu|threading|collections|pathlib|os|fnmatch)\b.*"),
    # Of use to a type checker only.
    (r"py:.*", r"(celery_distlock\.typing\.\w+|Celery|TaskOptions|P|R|R_co)"),
    (r"py:class", r"celery_distlock\.errors\.Interruption"),
    (r"py:mod", r"celery_distlock\.(runtime\.execution|clock|keys|engine\.shared_holds)"),
]
