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
        *("pgpassword", "passcode", "cred", "creds", "jwt", "otp", "bearer", "sessionid", "phpsessid", "jsessionid"),
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
_AFTER = frozenset(
    (
        *("value", "string", "text", "base64", "b64", "hex", "old", "new", "read", "write"),
        *("dev", "prod", "staging", "test"),
    )
)
"""Words that may follow the name of a secret: ``DB_PASSWORD_PROD``, like numbers."""
_BARE = re.compile(
    r"(?i)--?(?:pass|pat)\s(?![\d.+-]+$|(?:(?:for|back)ward|[fb]wd|both|all|first|last|true|false)$)(?!.*[*?\[\]^|\\])"
)
"""A ``--pass`` or ``--pat`` whose value neither selects a pass nor is a pattern."""
_NO_VALUE = frozenset(("no", "without", "skip", "use", "show", "require", "ignore"))
"""First words of options that are switches without a value."""
_LONGEST_NAME = 200
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_PAIRS = ("--metadata", "--capability", "--variable", "--env", "--build-arg")
"""Options that take a name and its value as two words, such as pytest-metadata's."""
_FORMS = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"gh[pousr]_[A-Za-z0-9]{16,}|gl[a-z]{2,6}-[\w-]{20,}|hf_[A-Za-z0-9]{16,}|sk-(?:\w+-)*\w{16,}"
    r"|sk-(?:ant|proj|svcacct|admin)-[\w-]{16,}|nvapi-[\w-]{16,}|xox[abeoprs]-[\w-]{10,}|xapp-\d-[\w-]{16,}"
    r"|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{30,}|AIza[\w-]{30,}|SG\.[\w-]{16,}\.[\w-]{16,}|ya29\.[\w-]{16,}|hv[sbr]\.[\w-]{20,}"
    r"|(?:[a-z]\w{0,12}_)?(?:pat|sk|rk|tkn|tok|pw|oauth|live)_[\w.-]{16,}|(?:r8|gsk|rpa|fw|tgp_v1|jina|ntn|api_org)_[A-Za-z0-9]{16,}|(?:pplx|xai|csk|GOCSPX)-[\w-]{16,}"
    r"|(?:dapi|key-|pul-|xkeysib-|(?:do[opr]_v1|shp\w{2}|sntry[su]|rubygems|lsv2_\w{2}|rdme|wandb_v1|sgp)_)[0-9a-f]{32,}"
    r"|ABSK[A-Za-z0-9+/=]{16,}|(?:AKIA|ASIA|ABIA|ACCA|LTAI|AKID)[A-Za-z0-9]{12,}|eyJ[\w-]{8,2000}\.[\w-]{8,4000}\.[\w-]*)"
)
"""Forms of the tokens of services; :data:`_OPAQUE` finds most others."""
_OPAQUE = re.compile(
    r"\b_Z\w+|(?<![A-Za-z0-9])(?!0x)(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z0-9]{30,}(?:[+/=][A-Za-z0-9+/=]*)?"
)
"""A symbol of C++, or a long word of letters and digits."""
_HEX = re.compile(r"[0-9a-f]+|[0-9A-F]+")
_CAMEL = re.compile(r"[A-Z][a-z]{3,}")
_TURNS = re.compile(r"(?<=[a-z])[A-Z\d]|(?<=[A-Z])\d|(?<=\d)[A-Za-z]|(?<=[A-Z]{2})[a-z]")
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_USER = re.compile(r"(?<=://)([^\s/@:]*):[^\s/@]+(?=@)|(?<=://)[^\s/@:]{20,}(?=@)")
_LOGIN = re.compile(r"--?(?:u|user|userpwd|(?:basic-|http-|proxy-)?auth|proxy-user)=(?!https?:)[^:]*:(.+)", re.DOTALL)
_IN_URL = re.compile(
    r"(?i)([?&#](?:sig|signature|x-\w+-signature|key|auth|code|pass|pw|pwd|pat|psk|sid|ticket|hmac|tok|access|session)="
    r"|[?&](?:t|k|s)=(?=[a-z\d_-]{6})(?=[a-z_-]*\d)(?=[\d_-]*[a-z])"
    r"|://(?:hooks\.slack|discord)\.com/(?:services|workflows|triggers|api/webhooks)/"
    r"|://[\w.-]+\.webhook\.office\.com/)[^\s&\"']+"
)
"""Signatures and short tokens in the query of a URL, and addresses that are secrets themselves."""
_COMMAND = re.compile(
    r"((?:(?:^|[\s=])[a-z]\w*\s+login|\bsshpass)\b(?:\s+[^\s|;&]+){0,12}?\s+-p[ =]?"
    r"|\b(?:mysql|mariadb)\w*\b(?:\s+[^\s|;&]+){0,12}?\s+-p"
    r"|\bredis-cli\b(?:\s+[^\s|;&]+){0,12}?\s+-a[ =]"
    r"|\bcurl\b(?:\s+[^\s|;&]+){0,12}?\s+(?:-u|--user|--proxy-user)[ =]?[^\s:]*:)"
    r"""["']?[^\s"']+"""
)
"""Options of one letter that take a secret: ``docker login -p``."""
_OPTION = re.compile(
    r"(?<!\S)(--?[A-Za-z][\w.-]*\s+)([\"']?)"
    r"(?!-|(?:is|are|was|has|must|may|can|cannot|and|or|to|not|in|from|for|with|of|if|by|needs|requires|should|option)\b)"
    r"([^\s\"']+)"
)
"""An option and its value inside one text; the words are those that follow an option in prose."""
_SCHEME = re.compile(
    r"\b((?i:Bearer)|(?i:(?<=authorization: )(?:Basic|token))|(?i:Basic|token)(?=(?:\s+|%20)[\w.~+/=-]*[A-Z\d=+]))"
    r"(\s+|%20)[\w.~+/=-]{8,}"
)
"""Outside of a header, the word after ``Basic`` or ``token`` needs a capital, a digit or a sign: else it is prose."""
_NAME = re.compile(
    r"""(?:(?<![\w.-])|(?<=%26)|(?<=%3[Ff]))(?P<name>-{0,2}[A-Za-z_][\w.-]*)"""
    r"""(?P<mark>["']?\s*(?::=|=>|[=:])\s*|%(?:25)*3[AaDd])"""
)
_VALUE = re.compile(r"""(?P<quote>["'])(?P<quoted>[^"']*)|(?:(?!%(?:25)*26)[^\s,;&"'}])+""")
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
    while len(words) > 1 and (words[-1] in _AFTER or words[-1].isdigit()):
        words.pop()
    before = words[-2] if len(words) > 1 else ""
    if words[-1] == "id":
        return before == "session"
    if words[-1] in ("key", "pass", "pwd", "pat"):
        return before in (_KEYS if words[-1] == "key" else _OWNERS)
    return words[-1] in _LAST and not (words[-1] == "token" and before in _TOKENS)


def _is_secret(name: str, value: str) -> bool:
    return is_secret_name(name) or _BARE.match(f"{name.strip()} {value}") is not None


def masked(text: str) -> str:
    """Return the text with :data:`MASK` in place of every secret.

    >>> masked("git clone https://ann:geheim@host/x; API_KEY='abc' curl -H 'Authorization: Bearer abcdefgh'")
    "git clone https://ann:***@host/x; API_KEY='***' curl -H 'Authorization: Bearer ***'"
    """
    text = _PRIVATE_KEY.sub(MASK, text)
    text = _USER.sub(lambda match: MASK if match[1] is None else f"{match[1]}:{MASK}", text)
    text = _IN_URL.sub(lambda match: f"{match[1]}{MASK}", text)
    text = _SCHEME.sub(lambda match: f"{match[1]}{match[2]}{MASK}", text)
    text = _COMMAND.sub(lambda match: f"{match[1]}{MASK}", text)
    text = _OPTION.sub(lambda match: match[1] + match[2] + MASK if _is_secret(match[1], match[3]) else match[0], text)
    text = _OPAQUE.sub(lambda match: MASK if _is_random(match[0]) else match[0], _FORMS.sub(MASK, text))
    return _without_named(text)


def _is_random(word: str) -> bool:
    """Return whether a long word is neither a symbol of C++, a hexadecimal digest, nor a name in camel case."""
    if word.startswith("_Z"):
        return False
    turns = sum(1 for _ in _TURNS.finditer(word))
    return not _HEX.fullmatch(word) and (len(_CAMEL.findall(word)) < 3 or turns > 0.27 * len(word))


def _without_named(text: str) -> str:
    """Return the text without the values of names that mark a secret."""
    parts, done = [], 0
    for match in _NAME.finditer(text):
        mark = match["mark"].strip()
        if match.start() < done or not _is_secret(match["name"], "any"):
            continue
        if mark == ":" and not _ONE_WORD.match(text, match.end()):
            continue
        value = _VALUE.match(text, match.end())
        if value is None or not _is_secret(match["name"], value["quoted"] or value[0]):
            continue
        if (value["quoted"] or not value["quote"]) and value[0] not in _SCHEMES:
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
    if option == "-p" and not word.startswith("no:") and _COMMAND.search(f"{' '.join(words[:index])} {word}"):
        return MASK
    return MASK if word and is_value and _is_secret(option, word) else masked(word)


def masked_value(value: Any, name: str = "") -> Any:
    """Return a JSON value without the secrets in its texts and in fields whose names mark a secret."""
    if isinstance(value, str):
        return MASK if value and is_secret_name(name) else masked(value)
    if isinstance(value, Mapping):
        return {key: masked_value(item, key) for key, item in value.items()}
    return [masked_value(item, name) for item in value] if isinstance(value, (list, tuple)) else value
