"""One table of the TOML file: each key is taken with its type and range; what is left is unknown.

Every error names the table and the key, and says what would be right.
"""

from collections.abc import Mapping

from perfledger.schema.errors import UsageError


class SettingsTable:
    """Takes keys out of a table; `end` refuses what nobody took."""

    def __init__(self, name: str, values: Mapping[str, object]) -> None:
        """Wrap what the TOML file says under `[name]`."""
        self._name = name
        self._values = dict(values)

    def integer(self, key: str, default: int, least: int, most: int) -> int:
        """Take a whole number within bounds, both allowed."""
        value = self._values.pop(key, default)
        if type(value) is not int or not least <= value <= most:
            raise self.error(key, f"a whole number from {least} to {most}")
        return value

    def number(self, key: str, default: float, least: float, most: float) -> float:
        """Take a number within bounds, both allowed."""
        return self._in_range(key, self._values.pop(key, default), least, most)

    def optional_number(self, key: str, least: float, most: float) -> float | None:
        """Take a number within bounds, or None where the key is absent."""
        if key not in self._values:
            return None
        return self._in_range(key, self._values.pop(key), least, most)

    def flag(self, key: str, default: bool) -> bool:
        """Take true or false."""
        value = self._values.pop(key, default)
        if type(value) is not bool:
            raise self.error(key, "true or false")
        return value

    def text(self, key: str, default: str = "") -> str:
        """Take a text."""
        value = self._values.pop(key, default)
        if type(value) is not str:
            raise self.error(key, "a text")
        return value

    def choice(self, key: str, choices: tuple[str, ...]) -> str:
        """Take one of some words; the first is the default."""
        value = self.text(key, choices[0])
        if value not in choices:
            raise self.error(key, " or ".join(choices))
        return value

    def texts(self, key: str, default: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Take a list of texts."""
        value = self._values.pop(key, list(default))
        if not isinstance(value, list) or not all(type(item) is str for item in value):
            raise self.error(key, 'a list of texts, such as ["a", "b"]')
        return tuple(value)

    def texts_by_name(self, key: str) -> dict[str, str]:
        """Take a table whose values are texts."""
        value = self._values.pop(key, {})
        if not isinstance(value, dict) or not all(type(item) is str for item in value.values()):
            raise self.error(key, f"a table of texts under [{self._name}.{key}]")
        return dict(value)

    def numbers_by_name(self, key: str, least: float, most: float) -> dict[str, float]:
        """Take a table whose values are numbers within bounds."""
        value = self._values.pop(key, {})
        if not isinstance(value, dict):
            raise self.error(key, f"a table of numbers under [{self._name}.{key}]")
        return {
            name: self._in_range(f"{key}.{name}", item, least, most) for name, item in value.items()
        }

    def end(self) -> None:
        """Raise UsageError where a key was not taken."""
        if self._values:
            unknown = ", ".join(sorted(self._values))
            raise UsageError(f"unknown setting: {unknown}", where=f"[{self._name}]")

    def error(self, key: str, right: str) -> UsageError:
        """Return the error of a key; its value is not shown, as it may be a secret."""
        return UsageError(
            f"bad value of {key}", where=f"[{self._name}]", fix=f"{key} must be {right}"
        )

    def _in_range(self, key: str, value: object, least: float, most: float) -> float:
        if type(value) is not int and type(value) is not float:
            raise self.error(key, f"a number from {least:g} to {most:g}")
        if not least <= value <= most:
            raise self.error(key, f"a number from {least:g} to {most:g}")
        return float(value)
