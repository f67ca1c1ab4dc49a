"""Make the JSON schemas beside this file from the published API models.

Run it by hand, in an environment of its own, when a schema should be newer:
`pip install kubeflow-trainer-api && python generate.py`.
"""

import importlib
import json
import re
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGE = "kubeflow-trainer-api"
JOB_SET = "JobsetV1alpha2JobSet"

# What the API server takes for a quantity and for an IntOrString: the models have
# classes of their own for these, whose fields are no fields of the document.
QUANTITY = {
    "type": ["string", "integer", "number"],
    "pattern": r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))"
    r"(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$",
}
INT_OR_STRING = {"type": ["string", "integer"]}
SCALARS = {
    "IoK8sApimachineryPkgApiResourceQuantity": QUANTITY,
    "IoK8sApimachineryPkgUtilIntstrIntOrString": INT_OR_STRING,
}

# Choices that the published definitions have and the models' texts do not list.
ENUMS = {
    (JOB_SET, "apiVersion"): ["jobset.x-k8s.io/v1alpha2"],
    (JOB_SET, "kind"): ["JobSet"],
    ("JobsetV1alpha2FailurePolicy", "restartStrategy"): [
        "Recreate",
        "BlockingRecreate",
    ],
    ("JobsetV1alpha2FailurePolicyRule", "action"): [
        "FailJobSet",
        "RestartJobSet",
        "RestartJobSetAndIgnoreMaxRestarts",
    ],
    ("JobsetV1alpha2SuccessPolicy", "operator"): ["All", "Any"],
}
REQUIRED = {JOB_SET: ["apiVersion", "kind", "metadata", "spec"]}

_CHOICE = re.compile(r'- `"(\w+)"`')


def plain(schema: Any, owner: str = "", field: str = "") -> Any:
    """A pydantic schema without texts, nulls and defaults, its choices as enums."""
    if isinstance(schema, list):
        return [plain(item, owner, field) for item in schema]
    if not isinstance(schema, dict):
        return schema
    choices = ENUMS.get((owner, field)) or _CHOICE.findall(
        schema.get("description", "")
    )
    if "anyOf" in schema:
        [schema] = [item for item in schema["anyOf"] if item != {"type": "null"}]
    result = {
        key: plain(value, owner, field)
        for key, value in schema.items()
        if key not in ("description", "title", "default", "properties")
    }
    if choices and result.get("type") == "string":
        result["enum"] = list(choices)
    return result


def definition(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """One object's schema; a field that it does not name is an error."""
    if name in SCALARS:
        return SCALARS[name]
    properties = {
        field: plain(value, name, field)
        for field, value in schema.get("properties", {}).items()
    }
    required = REQUIRED.get(name, schema.get("required", []))
    return closed(properties, required)


def closed(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        **({"required": sorted(required)} if required else {}),
        "additionalProperties": False,
    }


def job_set_definitions() -> dict[str, Any]:
    """The JobSet and all that it is made of, pods included."""
    models = importlib.import_module("kubeflow_trainer_api.models")
    schema = getattr(models, JOB_SET).model_json_schema(by_alias=True)
    parts = {**schema.pop("$defs"), JOB_SET: schema}
    return {name: definition(name, part) for name, part in parts.items()}


def reachable(name: str, definitions: dict[str, Any]) -> set[str]:
    """The definitions that one needs, itself included."""
    found = set()
    waiting = [name]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            text = json.dumps(definitions[name])
            waiting += re.findall(r'"#/\$defs/(\w+)"', text)
    return found


def main() -> None:
    """Write `kubernetes.json`: every definition on a line of its own."""
    definitions = job_set_definitions()
    # The controller writes the status; a manifest has none.
    definitions[JOB_SET]["properties"].pop("status", None)
    names = sorted(reachable(JOB_SET, definitions))
    lines = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(definitions[name])}" for name in names
    )
    source = f"{PACKAGE} {metadata.version(PACKAGE)}"
    comment = json.dumps(f"Made by generate.py from {source}; see README.md.")
    path = Path(__file__).with_name("kubernetes.json")
    path.write_text(f'{{"$comment": {comment}, "$defs": {{\n{lines}\n}}}}\n')


if __name__ == "__main__":
    main()
