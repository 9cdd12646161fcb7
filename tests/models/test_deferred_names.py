"""transformers' lists of names are made when they are needed, and are the same as without moechat."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from first_token import FirstToken

# Everything that a module with names tells about them, in a form that can be compared.
_TELL = """
def told(module):
    return [
        sorted(dir(module)),
        sorted(set(module.__all__)),
        sorted(module._modules),
        sorted(module._class_to_module.items()),
        sorted((key, sorted(set(names))) for key, names in module._import_structure.items()),
        sorted((key, sorted(needs)) for key, needs in module._object_missing_backend.items()),
        [module.__name__, module.__file__, module.__path__, module.__spec__.name, module.__package__],
    ]
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_first_token_needs_no_list_of_all_models(first_token: FirstToken) -> None:
    assert first_token.deferred == {"transformers", "transformers.models"}


_MODULES = ["transformers", "transformers.models"]


@pytest.fixture(scope="module")
def names() -> list[dict[str, list[object]]]:
    """What the modules tell about themselves, imported before moechat and by it."""
    told = ", ".join(f"{name!r}: told(sys.modules[{name!r}])" for name in _MODULES)
    tell = f"import json, sys, {', '.join(_MODULES)}\n{_TELL}\nprint(json.dumps({{{told}}}))"
    # The same modules are loaded in both, so that both have the same attributes.
    load = "import moechat.models.skeleton, transformers.modeling_layers\n"
    return [json.loads(run(code + tell)) for code in (f"import {', '.join(_MODULES)}\n{load}", load)]


@pytest.mark.parametrize("name", _MODULES)
def test_the_names_are_those_that_transformers_makes_itself(
    names: list[dict[str, list[object]]], name: str
) -> None:
    first, then = names
    assert first[name] == then[name]


def test_names_asked_for_early_have_the_same_meaning() -> None:
    out = run(
        "import sys\n"
        "from moechat.models import deferred_names\n"
        "module = sys.modules['transformers']\n"
        "early = module.__dict__['_later'][2][frozenset()]\n"
        "early = {name: key for key, names in early.items() for name in names}\n"
        "wrong = [name for name in early if module._class_to_module[name] != early[name]]\n"
        "print(len(early) > 100, wrong, set(module._class_to_module) & deferred_names._FILES)\n"
    )
    assert out.strip() == "True [] set()"


def test_a_model_is_found_by_its_name() -> None:
    out = run(
        "import moechat.models, pickle, transformers\n"
        "from transformers import Qwen3MoeForCausalLM as model, PreTrainedModel\n"
        "import transformers.models\n"
        "assert issubclass(model, PreTrainedModel) and transformers.Qwen3MoeForCausalLM is model\n"
        "assert transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeForCausalLM is model\n"
        "assert transformers.__version__ and pickle.loads(pickle.dumps(model)) is model\n"
        "try:\n"
        "    transformers.no_such_name\n"
        "except AttributeError as error:\n"
        "    print(error)\n"
    )
    assert out.strip() == "module transformers has no attribute no_such_name"
