"""The messages for readers, `envoy.proto`, and for programs, `envoy.binpb`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet

FOLDER = files("gorgo.picker.protocol")


def type_of(field: FieldDescriptorProto, package: str) -> str:
    if field.type == field.TYPE_MESSAGE:
        return str(field.type_name).removeprefix(f".{package}.").removeprefix(".")
    return str(FieldDescriptorProto.Type.Name(field.type)).removeprefix("TYPE_").lower()


def lines_of(message: DescriptorProto, package: str) -> Iterator[str]:
    """Yield the lines of a message as `envoy.proto` has them, without comments and indentation."""
    maps = {f".{package}.{message.name}.{entry.name}": entry for entry in message.nested_type}
    open_choice = None
    yield f"message {message.name} {{"
    for field in message.field:
        choice = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else None
        if choice != open_choice and open_choice is not None:
            yield "}"
        if choice != open_choice and choice is not None:
            yield f"oneof {choice} {{"
        open_choice = choice
        repeated = "repeated " if field.label == field.LABEL_REPEATED and field.type_name not in maps else ""
        kind = type_of(field, package)
        if field.type_name in maps:
            key, value = maps[field.type_name].field
            kind = f"map<{type_of(key, package)}, {type_of(value, package)}>"
        yield f"{repeated}{kind} {field.name} = {field.number};"
    yield from ["}"] * (1 if open_choice is None else 2)


def text_of(file: FileDescriptorProto) -> list[str]:
    head = [
        f'syntax = "{file.syntax}";',
        f"package {file.package};",
        *(f'import "{name}";' for name in file.dependency),
    ]
    return head + [line for message in file.message_type for line in lines_of(message, file.package)]


def test_what_programs_read_is_what_readers_read() -> None:
    (file,) = FileDescriptorSet.FromString(FOLDER.joinpath("envoy.binpb").read_bytes()).file
    written = FOLDER.joinpath("envoy.proto").read_text()
    lines = [re.sub(r"\s*//.*", "", line).strip() for line in written.splitlines()]
    assert text_of(file) == [line for line in lines if line]
