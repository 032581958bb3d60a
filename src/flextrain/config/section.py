"""What all sections of a configuration share: kinds of number, aliases, and how they refuse a mistake."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from flextrain.config.explain import SchemaWords, explain_error
from flextrain.errors import ConfigError


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("true and false are no numbers")
    return value


NoBool = BeforeValidator(_no_bool)
PositiveInt = Annotated[int, Field(ge=1), NoBool]
NonNegativeInt = Annotated[int, Field(ge=0), NoBool]
PositiveFloat = Annotated[float, Field(gt=0), NoBool]
Fraction = Annotated[float, Field(ge=0, le=1), NoBool]


def canonical_value(alias: str, value: Any) -> Any:
    """What a value given under an alias means under the canonical name."""
    bare_bucket = alias == "s3_bucket" and isinstance(value, str) and value and "://" not in value
    return f"s3://{value}" if bare_bucket else value


class Section(BaseModel):
    """A group of keys: unknown ones are refused, and assignment is checked like loading."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, validate_default=True, allow_inf_nan=False)

    def __init__(self, **values: Any) -> None:
        """Keys may go by their aliases, as in a file. Raises pydantic's ValidationError, which is a ValueError."""
        for alias, key in self.aliases().items():
            if alias in values:
                if key in values:
                    raise ConfigError(f"`{alias}` means `{key}`, which is given as well; keep one of them", number=4)
                values[key] = canonical_value(alias, values.pop(alias))
        super().__init__(**values)

    @classmethod
    def aliases(cls) -> dict[str, str]:
        """Alias -> canonical key."""
        extras = {key: field.json_schema_extra for key, field in cls.model_fields.items()}
        known = {key: extra.get("alias_of", []) for key, extra in extras.items() if isinstance(extra, dict)}
        return {str(alias): key for key, names in known.items() if isinstance(names, list) for alias in names}

    def __setattr__(self, name: str, value: Any) -> None:
        """Checked like loading; raises ConfigError (FT-CFG-004) and changes nothing where the value is refused."""
        before = dict(self.__dict__)
        try:
            super().__setattr__(name, value)
        except ValidationError as error:
            self.__dict__.update(before)  # pydantic keeps what a validator over several keys refused
            words = SchemaWords(type(self).model_json_schema())
            mistakes = "\n".join(explain_error(words, dict(item)) for item in error.errors())
            raise ConfigError(f"{type(self).__name__}: {mistakes}", number=4) from None
