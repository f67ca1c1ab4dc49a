"""Make the JSON schemas beside this file from the published API models.

Run it by hand, in an environment of its own, when a schema should be newer:
`pip install kubeflow-trainer-api kubeflow-training && python generate.py`.
"""

import importlib
import inspect
import json
import re
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("kubeflow-trainer-api", "kubeflow-training")
JOB_SET = "JobsetV1alpha2JobSet"
TF_JOB = "KubeflowOrgV1TFJob"
POD_TEMPLATE = "IoK8sApiCoreV1PodTemplateSpec"
OBJECT_META = "IoK8sApimachineryPkgApisMetaV1ObjectMeta"

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
    (TF_JOB, "apiVersion"): ["kubeflow.org/v1"],
    (TF_JOB, "kind"): ["TFJob"],
    ("KubeflowOrgV1ReplicaSpec", "restartPolicy"): [
        "Always",
        "OnFailure",
        "Never",
        "ExitCode",
    ],
    ("KubeflowOrgV1RunPolicy", "cleanPodPolicy"): ["All", "Running", "None"],
    ("KubeflowOrgV1TFJobSpec", "successPolicy"): ["", "AllWorkers"],
}
REQUIRED = {
    JOB_SET: ["apiVersion", "kind", "metadata", "spec"],
    TF_JOB: ["apiVersion", "kind", "metadata", "spec"],
    # The models leave these to the server, which refuses a job without them.
    "KubeflowOrgV1ReplicaSpec": ["template"],
}

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


def tf_job_definitions() -> dict[str, Any]:
    """The TFJob and its parts, whose models are plain classes; pods are shared."""
    models = importlib.import_module("kubeflow.training.models")
    found: dict[str, Any] = {}
    waiting = [TF_JOB]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        model = getattr(models, name)
        properties = {}
        required = []
        for attribute, kind in model.openapi_types.items():
            field = model.attribute_map[attribute]
            properties[field] = of_kind(kind, waiting)
            if choices := ENUMS.get((name, field)):
                properties[field]["enum"] = choices
            # The setter of a required field refuses None.
            if "is None" in inspect.getsource(getattr(model, attribute).fset):
                required.append(field)
        found[name] = closed(properties, REQUIRED.get(name, required))
    return found


def of_kind(kind: str, waiting: list[str]) -> dict[str, Any]:
    """The schema of a kind such as `dict(str, KubeflowOrgV1ReplicaSpec)`."""
    if match := re.fullmatch(r"dict\(str, (.*)\)", kind):
        return {
            "type": "object",
            "additionalProperties": of_kind(match[1], waiting),
        }
    if match := re.fullmatch(r"list\[(.*)\]", kind):
        return {"type": "array", "items": of_kind(match[1], waiting)}
    scalars = {"int": "integer", "str": "string", "bool": "boolean"}
    if kind in scalars:
        return {"type": scalars[kind]}
    if kind in ("datetime", "V1Time"):
        return {"type": "string"}
    if kind == "Quantity":
        return dict(QUANTITY)
    shared = {"V1PodTemplateSpec": POD_TEMPLATE, "V1ObjectMeta": OBJECT_META}
    if kind not in shared:
        waiting.append(kind)
    return {"$ref": f"#/$defs/{shared.get(kind, kind)}"}


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
    definitions = {**job_set_definitions(), **tf_job_definitions()}
    # The status is the controller's to write, a manifest has none.
    for name in (JOB_SET, TF_JOB):
        definitions[name]["properties"].pop("status", None)
    names = sorted(reachable(JOB_SET, definitions) | reachable(TF_JOB, definitions))
    lines = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(definitions[name])}" for name in names
    )
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES)
    comment = json.dumps(f"Made by generate.py from {versions}; see README.md.")
    path = Path(__file__).with_name("kubernetes.json")
    path.write_text(f'{{"$comment": {comment}, "$defs": {{\n{lines}\n}}}}\n')


if __name__ == "__main__":
    main()
