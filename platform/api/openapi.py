"""The OpenAPI document; bodies that handlers decode themselves are described to it here."""

from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import msgspec
from litestar.openapi import OpenAPIConfig
from litestar.openapi.spec import (
    Components,
    OpenAPI,
    OpenAPIMediaType,
    Operation,
    Reference,
    RequestBody,
    Schema,
    SecurityScheme,
)

_REFERENCE = "#/components/schemas/{name}"
_UPLOAD_TYPES = ("application/x-tar", "application/gzip", "application/zip", "multipart/form-data")
_described: dict[str, type[msgspec.Struct]] = {}


def json_body(kind: type[msgspec.Struct]) -> type[Operation]:
    """An operation whose body is `kind` as JSON."""
    _described[kind.__name__] = kind
    content = {
        "application/json": OpenAPIMediaType(
            schema=Reference(ref=_REFERENCE.format(name=kind.__name__))
        )
    }
    return _operation(content)


def upload_body() -> type[Operation]:
    """An operation whose body is an adapter's folder, packed or as multipart files."""
    binary = OpenAPIMediaType(schema=Schema(content_media_type="application/octet-stream"))
    return _operation(dict.fromkeys(_UPLOAD_TYPES, binary))


def _operation(content: dict[str, OpenAPIMediaType]) -> type[Operation]:
    @dataclass
    class WithBody(Operation):
        def __post_init__(self) -> None:
            self.request_body = RequestBody(content=content, required=True)

    return WithBody


def openapi_config() -> OpenAPIConfig:
    """Served as `/schema/openapi.json`."""
    return OpenAPIConfig(
        title="Polyloom",
        version=version("polyloom"),
        components=Components(
            security_schemes={"key": SecurityScheme(type="http", scheme="bearer")}
        ),
        security=[{"key": []}],
        render_plugins=[],
    )


def describe_bodies(document: OpenAPI) -> None:
    """Add what `json_body` refers to; Litestar describes only what it decodes itself."""
    schemas: dict[str, Any]
    _, schemas = msgspec.json.schema_components(_described.values(), ref_template=_REFERENCE)
    document.components.schemas = schemas | (document.components.schemas or {})
