"""What the API reference shows beyond the text of the sources: a Griffe extension.

Griffe reads sources and runs nothing, so it does not see what a decorator gives, where a setting is declared, or what
is imported on first use. Names in docstrings become links to their places in the reference.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import griffe

DECORATED = {"spark_elastic.jobs.run": ["run", "run_async"]}
"""Functions that get their arguments and the documentation of these from a decorator."""
ESTIMATORS = {
    "spark_elastic.ml.torch.estimator": "ElasticTorchEstimator",
    "spark_elastic.ml.keras.estimator": "ElasticKerasEstimator",
}
CLASSES_ALONE = ("spark_elastic.errors", "spark_elastic.ml.callbacks")
"""Modules without `__all__` whose functions are for the package itself."""
PUBLIC_MODULES = (
    "spark_elastic",
    "spark_elastic.data",
    "spark_elastic.diagnostics",
    "spark_elastic.errors",
    "spark_elastic.ml.callbacks",
    "spark_elastic.torch",
    "spark_elastic.torch.elastic",
    "spark_elastic.tensorflow",
    "spark_elastic.tensorflow.elastic",
    "spark_elastic.keras",
    "spark_elastic.keras.callbacks",
    "spark_elastic.keras.elastic",
)
"""Modules that users import from, in the order in which a name of several of them is looked up."""

_KINDS = {
    inspect.Parameter.POSITIONAL_OR_KEYWORD: griffe.ParameterKind.positional_or_keyword,
    inspect.Parameter.KEYWORD_ONLY: griffe.ParameterKind.keyword_only,
}
_LITERAL_BLOCK = re.compile(
    r"(?:^[ ]*|(?<=:)):{1,2}\n\n(?P<code>(?:(?:[ ]{4}.*)?\n)*[ ]{4}.*)(?=\n\n|\n*\Z)", re.MULTILINE
)
_CODE = re.compile(r"(?<!`)`(?P<name>[A-Za-z_][\w.]*)(?:\(\))?`(?!`)")
_FENCED = re.compile(r"(```.*?```)", re.DOTALL)


class SparkElastic(griffe.Extension):
    """Completes the package's objects when all of its modules are read."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        if pkg.path != "spark_elastic":
            return
        for module, names in DECORATED.items():
            for name in names:
                take_signature(_at(pkg, f"{module}.{name}"), _imported(module, name))
        for module, name in ESTIMATORS.items():
            explain_settings(_at(pkg, f"{module}.{name}"), _imported(module, name))
        for module in PUBLIC_MODULES:
            add_lazy_names(_at(pkg, module))
        for module in CLASSES_ALONE:
            for member in _at(pkg, module).members.values():
                if not member.is_alias:
                    member.public = member.is_class
        errors = [member.name for member in _at(pkg, "spark_elastic.errors").members.values() if member.is_public]
        links = link_targets(pkg)
        for each in _objects(pkg):
            if each.is_module:
                make_known(each, errors)
            if each.docstring is not None:
                each.docstring.value = as_markdown(each.docstring.value, links)


def add_lazy_names(module: griffe.Module) -> None:
    """Add the names that a module imports on first use, which its table `_LAZY` has."""
    if "_LAZY" not in module.members:
        return
    for name, (path, attribute) in ast.literal_eval(str(module["_LAZY"].value)).items():
        if name not in module.members and attribute is not None:
            module.set_member(name, griffe.Alias(name, f"{path}.{attribute}", parent=module))


def take_signature(function: griffe.Function, called: Any) -> None:
    """Give a function the signature and docstring that it has when it is called."""
    function.parameters = griffe.Parameters(
        *(
            griffe.Parameter(
                each.name,
                annotation=re.sub(r"\b(?:\w+\.)+(?=\w)", "", inspect.formatannotation(each.annotation)).strip("'"),
                kind=_KINDS[each.kind],
                default=None if each.default is inspect.Parameter.empty else repr(each.default),
            )
            for each in inspect.signature(called).parameters.values()
        )
    )
    function.decorators = []
    function.docstring = _docstring(inspect.getdoc(called) or "", function)


def explain_settings(estimator: griffe.Class, cls: Any) -> None:
    """Explain all settings in the docstring: with its own words, or else with those of their declarations."""
    before, _, explained = (inspect.getdoc(cls) or "").partition("\nArgs:\n")
    own = dict(re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", explained, re.MULTILINE))
    settings = [f"    {name}: {own.get(name) or getattr(cls, name).doc}" for name in inspect.signature(cls).parameters]
    estimator.docstring = _docstring("\n".join([before, "Args:", *settings]), estimator)


def make_known(module: griffe.Module, errors: list[str]) -> None:
    """Let a module resolve the errors that its docstrings name, imported or not."""
    for name in errors:
        if name not in module.members:
            module.set_member(name, griffe.Alias(name, f"spark_elastic.errors.{name}", parent=module))
            module.members[name].public = False


def link_targets(package: griffe.Module) -> dict[str, str]:
    """Return the places of the public classes and modules in the reference: by name, and by dotted path."""
    targets = {path: path for path in PUBLIC_MODULES}
    for path in PUBLIC_MODULES:
        module = _at(package, path)
        for name in module.exports or [each.name for each in module.members.values() if each.is_public]:
            targets[f"{path}.{name}"] = f"{path}.{name}"
            if name[0].isupper():
                targets.setdefault(str(name), f"{path}.{name}")
    return targets


def as_markdown(text: str, links: dict[str, str]) -> str:
    """Return a docstring with its literal blocks fenced, and links at the names that are in the reference."""
    text = _LITERAL_BLOCK.sub(_fence, text)
    pieces = _FENCED.split(text)
    pieces[::2] = [_CODE.sub(lambda found: _linked(found, links), piece) for piece in pieces[::2]]
    return "".join(pieces)


def _fence(found: re.Match[str]) -> str:
    code = inspect.cleandoc("\n" + found["code"])
    return f"\n```python\n{code}\n```"


def _linked(found: re.Match[str], links: dict[str, str]) -> str:
    target = links.get(found["name"])
    return found[0] if target is None else f"[{found[0]}][{target}]"


def _objects(package: griffe.Module) -> Iterator[Any]:
    """Yield the modules, classes, functions and attributes that are defined in a package."""
    yield package
    for member in list(package.members.values()):
        if not member.is_alias:
            yield from _objects(member)  # type: ignore[arg-type]


def _docstring(text: str, of: griffe.Object) -> griffe.Docstring:
    before = of.docstring
    line, end = (None, None) if before is None else (before.lineno, before.endlineno)
    parser = None if before is None else before.parser
    options = None if before is None else before.parser_options
    return griffe.Docstring(text, lineno=line, endlineno=end, parent=of, parser=parser, parser_options=options)


def _at(package: griffe.Module, path: str) -> Any:
    inside = path.removeprefix("spark_elastic").removeprefix(".")
    return package[inside] if inside else package


def _imported(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)
