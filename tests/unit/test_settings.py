"""Settings: every variable, its errors, its way to children, its row in the README."""

from __future__ import annotations

import msgspec
import pytest

from hrxmp.errors import SettingError
from hrxmp.settings import Settings, describe, unknown_variables, variable
from tests import readme


def test_defaults_survive_the_way_to_a_child() -> None:
    assert Settings.from_environment(Settings().to_environment()) == Settings()


def test_changed_settings_survive_the_way_to_a_child() -> None:
    changed = msgspec.structs.replace(
        Settings(), trace_compile=True, async_jit=False, workers=3, job_timeout_s=0.5,
        on_compile="error", device="0000:65:00.0",
    )  # fmt: skip
    assert Settings.from_environment(changed.to_environment()) == changed


@pytest.mark.parametrize(
    ("name", "text", "form"),
    [
        ("HRXMP_WORKERS", "many", "a whole number"),
        ("HRXMP_WORKERS", "-1", "0 or more"),
        ("HRXMP_JOB_TIMEOUT_S", "soon", "a number"),
        ("HRXMP_JOB_TIMEOUT_S", "nan", "0 or more"),
        ("HRXMP_ASYNC_JIT", "maybe", "1 or 0"),
        ("HRXMP_ON_COMPILE", "panic", "off, warn, error"),
    ],
)
def test_a_bad_value_names_variable_text_and_form(name: str, text: str, form: str) -> None:
    with pytest.raises(SettingError) as caught:
        Settings.from_environment({name: text})
    assert all(part in str(caught.value) for part in (name, text, form))


def test_the_original_variable_turns_the_trace_on() -> None:
    assert Settings.from_environment({"GGML_HRX_TRACE_COMPILE": "1"}).trace_compile
    both = {"GGML_HRX_TRACE_COMPILE": "1", "HRXMP_TRACE_COMPILE": "0"}
    assert not Settings.from_environment(both).trace_compile


def test_every_setting_is_in_the_readme() -> None:
    text = readme.README.read_text()
    assert readme.with_table(text) == text
    for field, _kind, _help in describe():
        assert f"`{variable(field)}`" in text


def test_flags_are_checked_like_variables() -> None:
    assert Settings().with_flags({"workers": 3, "async_jit": False}).workers == 3
    with pytest.raises(SettingError, match="--workers='-1': expected 0 or more"):
        Settings().with_flags({"workers": -1})


def test_misspelled_variables_are_noticed() -> None:
    environ = {"HRXMP_WORKER": "3", "HRXMP_WORKERS": "3", "PATH": ""}
    assert unknown_variables(environ) == ["HRXMP_WORKER"]
