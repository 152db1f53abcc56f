"""Mask secrets in the records of a run: in the command line, variables, parameters and log lines.

A secret is found by its name (``--api-key=...``, ``PASSWORD=...``), by its form (``ghp_...``, a JSON web token) or by
its place (``https://user:password@host``). Only its value is replaced.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MASK = "***"
_LAST = frozenset(
    (
        *("password", "passwd", "passphrase", "secret", "secrets", "credential", "credentials", "cookie"),
        *("token", "authtoken", "apikey", "accesskey", "privatekey", "secretkey", "authorization"),
        *("pgpassword", "passcode", "creds", "jwt", "otp", "bearer"),
    )
)
"""Last words of the names of secrets."""
_KEYS = frozenset(
    (
        *("access", "account", "api", "auth", "client", "deploy", "encryption", "host", "license", "master"),
        *("perfsuite", "private", "secret", "service", "shared", "signing", "ssh", "ssl", "storage", "subscription"),
        *("anthropic", "comet", "datadog", "hf", "mlflow", "neptune", "ngc", "openai", "wandb"),
    )
)
"""Words before ``key`` in the names of secrets: not a sort key or a cache key."""
_OWNERS = frozenset(("admin", "db", "github", "gitlab", "http", "mysql", "proxy", "redis", "root", "smtp", "user"))
"""Words before ``pass``, ``pwd`` and ``pat``: not a forward pass or a working directory."""
_TOKENS = frozenset(
    ("bos", "cls", "eos", "image", "mask", "next", "pad", "per", "sep", "special", "unk", "max", "min", "num")
)
"""Words before ``token`` in the names of text tokens: ``pad_token``."""
_NO_VALUE = frozenset(("no", "without", "skip", "use", "show", "require", "ignore"))
"""First words of options that are switches without a value."""
_LONGEST_NAME = 200
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_PAIRS = ("--metadata", "--capability", "--variable", "--env", "--build-arg")
"""Options that take a name and its value as two words, such as pytest-metadata's."""
_FORMS = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{20,}|glpat-[\w-]{16,}|hf_[A-Za-z0-9]{16,}|sk-(?:\w+-)*\w{16,}|sk_live_\w{16,}"
    r"|sk-(?:ant|proj|svcacct|admin)-[\w-]{16,}|nvapi-[\w-]{16,}|xox[abeprs]-[\w-]{10,}"
    r"|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{30,}|dckr_pat_[\w-]{20,}|AIza[\w-]{30,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|eyJ[\w-]{8,2000}\.[\w-]{8,4000}\.[\w-]*)"
)
"""Forms of the tokens of services."""
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_USER = re.compile(r"(?<=://)([^\s/@:]*):[^\s/@]+(?=@)|(?<=://)[^\s/@:]{20,}(?=@)")
_LOGIN = re.compile(r"--?(?:u|user|userpwd|(?:basic-|http-|proxy-)?auth|proxy-user)=(?!https?:)[^:]*:(.+)", re.DOTALL)
_IN_URL = re.compile(
    r"(?i)([?&](?:sig|signature|x-\w+-signature|key|auth)=|://(?:hooks\.slack|discord)\.com/(?:services|api/webhooks)/)[^\s&\"']+"
)
"""Signatures in the query of a URL, and addresses that are secrets themselves."""
_SCHEME = re.compile(
    r"\b((?i:Bearer)|(?i:(?<=authorization: )(?:Basic|token))|(?i:Basic|token)(?=(?:\s+|%20)[\w.~+/=-]*[A-Z\d=+]))"
    r"(\s+|%20)[\w.~+/=-]{8,}"
)
"""Outside of a header, the word after ``Basic`` or ``token`` needs a capital, a digit or a sign: else it is prose."""
_NAME = re.compile(r"""(?<![\w.-])(?P<name>-{0,2}[A-Za-z_][\w.-]*)(?P<mark>["']?\s*[=:]\s*)""")
_VALUE = re.compile(r"""(?P<quote>["'])(?P<quoted>[^"']*)|[^\s,;&"'}]+""")
_SCHEMES = ("Bearer", "Basic", "token")
_ONE_WORD = re.compile(r"""[\w.~+/=$%!-]{8,}(?=[\s,;&"'}]|$)""")
"""A secret after a colon is one long word; ``unexpected token: }`` contains none."""


def is_secret_name(name: str) -> bool:
    """Return whether a value with this name is a secret.

    >>> [is_secret_name(name) for name in ("PERFSUITE_KEY", "accessKey", "pad_token", "sort-key", "token_embedding")]
    [True, True, False, False, False]
    """
    words = [word.lower() for word in _WORD.findall(name[-_LONGEST_NAME:])]
    if not words or (len(words) > 1 and words[0] in _NO_VALUE):
        return False
    before = words[-2] if len(words) > 1 else ""
    if words[-1] in ("key", "pass", "pwd", "pat"):
        return before in (_KEYS if words[-1] == "key" else _OWNERS)
    return words[-1] in _LAST and not (words[-1] == "token" and before in _TOKENS)


def masked(text: str) -> str:
    """Return the text with :data:`MASK` in place of every secret.

    >>> masked("git clone https://ann:geheim@host/x; API_KEY='abc' curl -H 'Authorization: Bearer abcdefgh'")
    "git clone https://ann:***@host/x; API_KEY='***' curl -H 'Authorization: Bearer ***'"
    """
    text = _PRIVATE_KEY.sub(MASK, text)
    text = _USER.sub(lambda match: MASK if match[1] is None else f"{match[1]}:{MASK}", text)
    text = _IN_URL.sub(lambda match: f"{match[1]}{MASK}", text)
    text = _SCHEME.sub(lambda match: f"{match[1]}{match[2]}{MASK}", text)
    return _without_named(_FORMS.sub(MASK, text))


def _without_named(text: str) -> str:
    """Return the text without the values of names that mark a secret."""
    parts, done = [], 0
    for match in _NAME.finditer(text):
        mark = match["mark"].strip()
        if match.start() < done or not is_secret_name(match["name"]):
            continue
        if mark == ":" and not _ONE_WORD.match(text, match.end()):
            continue
        value = _VALUE.match(text, match.end())
        if value is not None and (value["quoted"] or not value["quote"]) and value[0] not in _SCHEMES:
            parts += [text[done : match.end()], value["quote"] or "", MASK]
            done = value.end()
    return "".join([*parts, text[done:]])


def masked_words(words: Iterable[str]) -> tuple[str, ...]:
    """Return a command line without its secrets, also if an option's value is a separate word; ids of tests stay."""
    words = tuple(words)
    return tuple(_shown(words, index) for index in range(len(words)))


def _shown(words: Sequence[str], index: int) -> str:
    word = words[index]
    option = words[index - 1] if index and not word.startswith("-") else ""
    if login := _LOGIN.fullmatch(f"{option}={word}" if option else word):
        return word.removesuffix(login[1]) + MASK
    if "::" in word and "://" not in word:
        return word
    is_value = (option.startswith("-") and "=" not in option) or (index > 1 and words[index - 2] in _PAIRS)
    return MASK if word and is_value and is_secret_name(option) else masked(word)


def masked_value(value: Any, name: str = "") -> Any:
    """Return a JSON value without the secrets in its texts and in fields whose names mark a secret."""
    if isinstance(value, str):
        return MASK if value and is_secret_name(name) else masked(value)
    if isinstance(value, Mapping):
        return {key: masked_value(item, key) for key, item in value.items()}
    return [masked_value(item, name) for item in value] if isinstance(value, (list, tuple)) else value
