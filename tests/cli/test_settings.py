"""The sources of settings, and the readers of their values."""

from typing import Any

import pytest

from jaxinfer.cli import settings
from jaxinfer.cli.settings import File, Setting, resolve_settings, unknown_variables
from jaxinfer.core.errors import ConfigError

PORT = Setting("port", settings.integer, "")
KEYS = Setting("api_key", settings.texts, "", environment=("VLLM_API_KEY",), secret=True)
PAGE = Setting("block_size", settings.size, "", ("--page-size", "-b"))
STRICT = Setting("strict_fields", settings.boolean, "")
KNOWN = (PORT, KEYS, PAGE, STRICT)


def test_a_flag_wins_over_the_environment_and_that_over_the_file() -> None:
    file = File("f.yaml", {"port": 1, "block-size": "1k", "strict_fields": True, "api-key": None})
    environ = {"JAXINFER_PORT": "2", "JAXINFER_BLOCK_SIZE": "32", "PORT": "9"}
    resolved = resolve_settings(KNOWN, {"port": "3", "api_key": ()}, environ, file)
    assert resolved == {
        "port": (3, "flag"),
        "block_size": (32, "environment JAXINFER_BLOCK_SIZE"),
        "strict_fields": (True, "file f.yaml"),
    }


def test_no_source_gives_no_settings() -> None:
    assert resolve_settings(KNOWN, {}, {}) == {}


def test_aliases_are_keys_and_variables() -> None:
    assert resolve_settings(KNOWN, {}, {}, File("f", {"page_size": 8}))["block_size"].value == 8
    environ = {"JAXINFER_PAGE_SIZE": "8", "VLLM_API_KEY": "k"}
    resolved = resolve_settings(KNOWN, {}, environ)
    assert resolved["block_size"].value == 8
    assert resolved["api_key"] == (("k",), "environment VLLM_API_KEY")


FILES: dict[str, tuple[dict[Any, Any], str]] = {
    "unknown": ({"prot": 1}, r"'prot' in f\.yaml is no setting"),
    "unknown, not text": ({5: 1}, r"5 in f\.yaml is no setting"),
    "twice": ({"page_size": 1, "block-size": 2}, "'page_size' and 'block-size' in f.yaml are the"),
    "type": ({"port": "http"}, r"port in f\.yaml must be a whole number, got 'http'"),
    "type of a list": ({"port": [1]}, r"port in f\.yaml must be a whole number, got \[1\]"),
    "bool for a number": ({"port": True}, "must be a whole number, got True"),
    "number for a bool": ({"strict_fields": 1}, "must be true or false, got 1"),
}


def test_settings_of_other_commands_in_a_file() -> None:
    file = File("f.yaml", {"port": 1, "strict-fields": True})
    assert resolve_settings((PORT,), {}, {}, file, KNOWN) == {"port": (1, "file f.yaml")}
    with pytest.raises(ConfigError, match="'strict-fields' in f.yaml is no setting"):
        resolve_settings((PORT,), {}, {}, file)


@pytest.mark.parametrize(("entries", "message"), FILES.values(), ids=FILES)
def test_a_wrong_key_is_named_with_its_file(entries: dict[Any, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_settings(KNOWN, {}, {}, File("f.yaml", entries))


def test_a_wrong_variable_is_named() -> None:
    with pytest.raises(
        ConfigError, match="JAXINFER_PORT must be a whole number, got 'tcp.*Kubernetes"
    ):
        resolve_settings(KNOWN, {}, {"JAXINFER_PORT": "tcp://1:2"})


def test_a_wrong_secret_is_not_shown() -> None:
    with pytest.raises(ConfigError, match="api_key in f must be a text or a list") as caught:
        resolve_settings(KNOWN, {}, {}, File("f", {"api_key": {"hidden": 1}}))
    assert "hidden" not in str(caught.value)


def test_unknown_variables() -> None:
    environ = {"JAXINFER_PORT": "", "JAXINFER_PROT": "", "JAXINFER_CONFIG": "", "VLLM_PORT": ""}
    assert unknown_variables(KNOWN, environ) == ["JAXINFER_PROT"]


READ: tuple[tuple[settings.Reader, Any, Any], ...] = (
    (settings.size, "4096", 4096),
    (settings.size, 4096, 4096),
    (settings.size, "32k", 32_000),
    (settings.size, "32K", 32_768),
    (settings.size, "25.6k", 25_600),
    (settings.size, "1.7m", 1_700_000),
    (settings.size, "4G", 4 << 30),
    (settings.size_or_auto, "auto", None),
    (settings.size_or_auto, -1, None),
    (settings.size_or_auto, "2k", 2000),
    (settings.integer, "-3", -3),
    (settings.number, "0.5", 0.5),
    (settings.number, 1, 1.0),
    (settings.boolean, "true", True),
    (settings.boolean, "0", False),
    (settings.texts, "a", ("a",)),
    (settings.texts, ("a", "b"), ("a", "b")),
    (settings.texts, '["*"]', ("*",)),
    (settings.texts, ('["a"]', "b"), ("a", "b")),
    (settings.texts, ["a", "b"], ("a", "b")),
    (settings.plain_texts, ("[a", "b"), ("[a", "b")),
    (settings.plain_texts, "[a]", ("[a]",)),
    (settings.integers, ("1,2", "3"), (1, 2, 3)),
    (settings.integers, [1, 2], (1, 2)),
    (settings.mapping, '{"a": 1}', {"a": 1}),
    (settings.mapping, {"a": 1}, {"a": 1}),
)


@pytest.mark.parametrize(("read", "given", "value"), READ)
def test_reading(read: settings.Reader, given: Any, value: Any) -> None:
    found = read(given)
    assert found == value
    assert type(found) is type(value)


UNREADABLE: tuple[tuple[settings.Reader, Any], ...] = (
    (settings.size, "4.5K"),
    (settings.size, "32kk"),
    (settings.size, "auto"),
    (settings.size, 1.5),
    (settings.integer, "1e3"),
    (settings.integer, "9" * 5000),
    (settings.number, "many"),
    (settings.number, True),
    (settings.boolean, "maybe"),
    (settings.boolean, None),
    (settings.text, 5),
    (settings.texts, "[1]"),
    (settings.texts, '["a"'),
    (settings.texts, 5),
    (settings.plain_texts, [1]),
    (settings.integers, "1;2"),
    (settings.integers, [True]),
    (settings.mapping, "[1]"),
    (settings.mapping, "{"),
    (settings.mapping, 5),
)


@pytest.mark.parametrize(("read", "given"), UNREADABLE)
def test_unreadable(read: settings.Reader, given: Any) -> None:
    with pytest.raises(ValueError):
        read(given)
