"""Requests drawn from the server's own description of itself, and what every answer to one must be."""

from typing import Any

from hypothesis import strategies as st

from shardwise.serving.http.bodies import ERROR, description
from shardwise.serving.http.schema import checked

DESCRIBED = description("0")
SCHEMAS = DESCRIBED["components"]["schemas"]
ASKED = {
    path: SCHEMAS[operations["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].split("/")[-1]]
    for path, operations in DESCRIBED["paths"].items()
    if "post" in operations
}
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(sorted({name for schema in ASKED.values() for name in schema["properties"]}))


def values(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    if "anyOf" in schema:
        return st.one_of(*map(values, schema["anyOf"]))
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kinds = schema.get("type")
    if isinstance(kinds, list):
        return st.one_of(*(values({**schema, "type": kind}) for kind in kinds))
    low, high = schema.get("minimum"), schema.get("maximum")
    if kinds == "integer":
        return st.integers(low, high if high is None else min(high, 6))
    if kinds == "number":
        floor = schema.get("exclusiveMinimum", low)
        return st.floats(floor, high, exclude_min="exclusiveMinimum" in schema, allow_nan=False)
    if kinds == "string":
        return TEXT.filter(lambda text: len(text) >= schema.get("minLength", 0))
    if kinds == "array":
        fewest, most = schema.get("minItems", 0), min(3, schema.get("maxItems", 3))
        return st.lists(values(schema.get("items", {})), min_size=fewest, max_size=most)
    if kinds == "object":
        fields, needed = schema.get("properties", {}), schema.get("required", ())
        optional = {name: values(field) for name, field in fields.items() if name not in needed}
        return st.fixed_dictionaries({name: values(fields[name]) for name in needed}, optional=optional)
    return {"boolean": st.booleans(), "null": st.none()}.get(kinds, ANYTHING)


@st.composite
def changed(draw: st.DrawFn, path: str) -> Any:
    """A described body with some fields replaced by anything, left out, or added."""
    body = draw(values(ASKED[path]))
    for name in draw(st.lists(FIELDS | st.text(max_size=6), max_size=3)):
        body[name] = draw(ANYTHING)
    for name in draw(st.lists(FIELDS, max_size=2)):
        body.pop(name, None)
    return draw(st.sampled_from([body, body, body, [body], None]))


def is_described(status: int, answer: Any, path: str, method: str = "post") -> None:
    """A status that the description knows, and an error in the form it gives."""
    assert str(status) in DESCRIBED["paths"][path][method]["responses"], answer
    assert status < 500, answer
    if status != 200:
        assert checked(ERROR, answer) == answer
