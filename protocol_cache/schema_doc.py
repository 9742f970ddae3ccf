"""The protocol's schema as a page: ``python -m protocol_cache.schema_doc > docs/protocol-schema.md``."""

from __future__ import annotations

from typing import Any

from protocol_cache.schema import SCHEMA_VERSION, protocol_schema


def _kind(rule: dict[str, Any]) -> str:
    """What may stand there, in words."""
    if "const" in rule:
        return f"`{rule['const']}`"
    if "enum" in rule:
        return ", ".join(f"`{value}`" for value in rule["enum"])
    if "$ref" in rule:
        line = protocol_schema()["$defs"]["line"]
        return f"text, not blank, up to {line['maxLength']} characters"
    if rule["type"] == "array":
        least, most = rule.get("minItems", 0), rule["maxItems"]
        inner = "objects" if rule["items"].get("type") == "object" else f"items: {_kind(rule['items'])}"
        return f"{least} to {most} {inner}"
    bounds = [f"at least {rule['minimum']}"] if "minimum" in rule else []
    bounds += [f"{rule['minLength']} to {rule['maxLength']} characters"] if "minLength" in rule else []
    return ", ".join([{"string": "text", "integer": "whole number"}.get(rule["type"], rule["type"]), *bounds])


def schema_page() -> str:
    """The whole page, Markdown."""
    schema = protocol_schema()
    branches = {branch["title"]: branch for branch in schema["oneOf"]}
    lines = [
        f"# Protocol schema, version {SCHEMA_VERSION}",
        "",
        f"{schema['description']} Written by `python -m protocol_cache.schema_doc` from",
        f"`protocol_cache/schemas/protocol.v{SCHEMA_VERSION}.json` (JSON Schema 2020-12); unknown fields are refused.",
        "",
        f"| field | {' | '.join(branches)} | what may stand there | meaning |",
        f"|---|{'---|' * len(branches)}---|---|",
    ]
    for name, rule in schema["properties"].items():
        uses = []
        for branch in branches.values():
            barred = branch["properties"].get(name) is False
            needed = name in branch["required"] or name in schema["required"]
            uses.append("-" if barred else "yes" if needed else "may")
        lines.append(f"| `{name}` | {' | '.join(uses)} | {_kind(rule)} | {rule['description']} |")
        if rule.get("items", {}).get("type") == "object":
            for inner, its in rule["items"]["properties"].items():
                meaning = its["description"]
                lines.append(f"| `{name}[].{inner}` | {' | '.join(uses)} | {_kind(its)} | {meaning} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(schema_page(), end="")
