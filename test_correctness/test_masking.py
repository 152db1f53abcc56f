"""Secrets are masked by name, form and place, and what only looks like one is not."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.base.masking import MASK, masked, masked_value, masked_words
from perfsuite.cli import main as cli
from perfsuite.record.journal import read_journal
from test_correctness.helpers.scripted_driver import repository

GEHEIM = "geheim12345"
SECRETS = [
    [f"--token={GEHEIM}"],
    ["--password", GEHEIM],
    [f"--api-key={GEHEIM}"],
    ["--apikey", GEHEIM],
    [f"--db-password='{GEHEIM}'"],
    ["-o", f"secret={GEHEIM}"],
    [f"-oapi_token={GEHEIM}"],
    ["--override-ini", f"html_report_password={GEHEIM}"],
    ["--metadata", "API_TOKEN", GEHEIM],
    ["--capability", "accessKey", GEHEIM],
    ["--variables-json", f'{{"password": "{GEHEIM}", "user": "ann"}}'],
    [f"--base-url=https://ann:{GEHEIM}@host/x"],
    [f"--base-url=https://:{GEHEIM}@host"],
    [f"postgresql://perf:{GEHEIM}@db:5432/x"],
    [f"https://host/x?access_token={GEHEIM}&page=2"],
    [f"https://x-access-token:{GEHEIM}@github.com/a/b.git"],
    [f"PERFSUITE_KEY={GEHEIM}"],
    [f"WANDB_API_KEY={GEHEIM}"],
    [f"AWS_SECRET_ACCESS_KEY={GEHEIM}"],
    [f"--header=Authorization: Bearer {GEHEIM}"],
    ["--header", f"Authorization: Basic {GEHEIM}"],
    ["-H", f"Authorization: token {GEHEIM}"],
    ["-k", f"ghp_{GEHEIM}abcdefghijk"],
    [f"--hub=hf_{GEHEIM}abcdefghijk"],
    [f"--x=sk-proj-{GEHEIM}abcdefghijk"],
    [f"--x=glpat-{GEHEIM}abcdefghijk"],
    [f"--x=xoxb-{GEHEIM}"],
    [f"--x=eyJhbGciOiJI.eyJ{GEHEIM}.sig"],
    [f"--cert=-----BEGIN RSA PRIVATE KEY-----\n{GEHEIM}\n-----END RSA PRIVATE KEY-----"],
    [f"--opts=a=1,client_secret={GEHEIM},b=2"],
    ["--wandb_key", GEHEIM],
    [f"--wandb.key={GEHEIM}"],
    [f"OPENAI_KEY={GEHEIM}"],
    ["-u", f"ann:{GEHEIM}"],
    ["--auth", f"ann:{GEHEIM}"],
    [f"--proxy-user=ann:{GEHEIM}"],
    [f"https://host/x?sv=1&sig={GEHEIM}"],
    [f"https://host/x?X-Amz-Signature={GEHEIM}&page=2"],
    [f"https://hooks.slack.com/services/T0/B0/{GEHEIM}"],
    [f"https://discord.com/api/webhooks/123/{GEHEIM}"],
    [f"PGPASSWORD={GEHEIM}"],
    [f"MYSQL_PWD={GEHEIM}"],
    [f"--db-pass={GEHEIM}"],
    [f"GITHUB_PAT={GEHEIM}"],
    ["--bearer", GEHEIM],
    [f"--jwt={GEHEIM}"],
    [f"--x=nvapi-{GEHEIM}-abcdefgh"],
    [f"--x=sk-ant-api03-{GEHEIM}-abcdefgh"],
    ["docker", "login", "-u", "ann", "-p", GEHEIM],
    [f"--setup=docker login -u ann -p {GEHEIM} host"],
    [f"--setup=mysql -uroot -p{GEHEIM} db"],
    [f"--setup=curl -u ann:{GEHEIM} https://host"],
    [f"--setup=run --password {GEHEIM} --fast"],
    ["--pass", GEHEIM],
    [f"--pat={GEHEIM}"],
    [f"--session-id={GEHEIM}"],
    [f"--cred={GEHEIM}"],
    ["--creds", GEHEIM],
    [f"--db-password-prod={GEHEIM}"],
    [f"PASSWORD1={GEHEIM}"],
    [f"callback=https%3A%2F%2Fhost%2F%3Ftoken%3D{GEHEIM}%26page%3D2"],
    [f"token%253D{GEHEIM}"],
    [f"https://host/x?t={GEHEIM}"],
    [f"https://host/x?page=2&key={GEHEIM}"],
    [f"https://host/x?code={GEHEIM}"],
    [f"--x=rpa_{GEHEIM}ABCDEFGHIJ"],
    [f"--x=ABSK{GEHEIM}+/abcdefgh="],
    [f"--x=gsk_{GEHEIM}ABCDEFGHIJ"],
    [f"--x=sm_pat_{GEHEIM}ABCDEFGHIJ"],
    [f"--x=of_no_list_{GEHEIM}abcdefghij0123456789"],
    [f"{GEHEIM}7Yx0KdPq93LmZtRw5VbNcS8eHj"],
    [f"Z{GEHEIM}7Yx0KdPq93LmZtRw5VbNcS8eHj"],
]
NO_SECRETS = [
    ["-k", "token_embedding"],
    ["-k", "token", "test_perf"],
    ["-k", "not password and secret"],
    ["-m", "secret"],
    ["--perf-published=002"],
    ["--perf-against=0123456789abcdef0123456789abcdef01234567"],
    ["0123456789abcdef0123456789abcdef01234567"],
    ["test_auth.py::test_login[token=abcdefgh-password=12345678]"],
    ["test_perf/test_matmul.py::test_matmul[cpu-1024-fp32]"],
    ["/home/ann/secrets/test_it.py"],
    ["--token-file=/run/secrets/token"],
    ["--password-file", "/run/secrets/password"],
    ["PERFSUITE_KEY_FILE=/run/key"],
    ["--pad-token=<pad>"],
    ["--max-token=512"],
    ["--num-tokens=1024"],
    ["--sort-key=name"],
    ["--cache-key", "abc"],
    ["--no-password", "test_perf"],
    ["--keyboard=us"],
    ["--author=ann"],
    ["--monkey=1"],
    ["https://github.com/a/b/blob/main/x.py?plain=1#L3"],
    ["ssh://git@github.com/a/b.git"],
    ["git@github.com:a/b.git"],
    ["-p", "no:cacheprovider"],
    ["-o", "junit_suite_name=basic"],
    ["--benchmark-json=out.json", "--html=report.html", "--self-contained-html", "--durations=5"],
    ["--deselect", "test_token.py::test_secret"],
    ["skipping sk-learn-benchmark-suite and task-based tests"],
    ["--ignore-glob=*token*"],
    ["--forward-pass=2", "--pass", "backward"],
    ["PWD=/home/ann/project"],
    ["-u", "test_perf"],
    ["--pat=test_*"],
    ["https://host/x?key_size=2&signature_version=4"],
    ["--user=ann", "--auth=basic", "-u"],
    ["--passes", "3", "--pattern", "x", "--patience=3", "--pp", "4", "--session-timeout", "3", "--credits=3"],
    ["-k", "login", "-p", "no:benchmark", "-p", "pytest_cov"],
    ["--pass=2", "--pass", "forward", "--pat", "*.py"],
    ["https://host/x?t=120&s=20&page=2"],
    ["docker login is needed", "ssh -p 22 host", "error: --password is required"],
    ["sha256:" + "0123456789abcdef" * 4, "/cache/snapshots/" + "0123456789abcdef0123" * 2],
    ["FullyShardedDataParallelFp16AndBf16Test"],
    ["undefined symbol: _ZN3c1017RegisterOperators10fromSchemaERKNS_14FunctionSchemaE"],
    ["undefined symbol: _ZN2at4_ops5zeros4callEN3c108ArrayRefINS2_6SymIntEEESt8optionalINS2_10ScalarTypeEES6_IbE"],
    ["sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x16_stage4_warpsize2x2x1_tensor16x8x8_kernel"],
    ["GPU-0f1e2d3c-aaaa-bbbb-cccc-0123456789ab", "torch-2.13.0+cu128", "cpu-amd-epyc-2c-890837bd"],
]


@pytest.mark.parametrize("words", SECRETS, ids=lambda words: words[0][:30])
def test_a_secret_is_masked(words):
    shown = masked_words(words)
    assert "geheim" not in " ".join(shown)
    assert MASK in " ".join(shown)
    assert masked_words(shown) == shown


@pytest.mark.parametrize("words", NO_SECRETS, ids=lambda words: words[0][:30])
def test_what_is_no_secret_stays(words):
    assert masked_words(words) == tuple(words)


def test_only_the_value_goes():
    shown = masked_words(
        ["--base-url=https://ann:x@host/x", "--opts=a=1,client_secret=x,b=2", "https://h/?token=x&page=2"]
    )
    assert shown == (
        "--base-url=https://ann:***@host/x",
        "--opts=a=1,client_secret=***,b=2",
        "https://h/?token=***&page=2",
    )


@pytest.mark.parametrize(
    "text",
    [
        "SyntaxError: unexpected token: }",
        "rank 1 raised KeyError: 'key'",
        "AssertionError: token: 5 is not 6",
        "loss=nan, tokens: 1024, tokens_per_s=12.5",
        "MFU 45 %: see https://a.b/c/d",
        "Basic training loop",
        "RuntimeError: token embedding_size mismatch",
    ],
)
def test_prose_stays(text):
    assert masked(text) == text


def test_values_are_masked_by_the_names_of_their_fields():
    value = {"env": {"HF_TOKEN": "x", "NCCL_ALGO": "Ring"}, "list": [{"password": "y"}], "n": 3, "token": None}
    assert masked_value(value) == {
        "env": {"HF_TOKEN": MASK, "NCCL_ALGO": "Ring"},
        "list": [{"password": MASK}],
        "n": 3,
        "token": None,
    }


@given(st.text(alphabet="ab-_=:/@'\" {}\n.?&token", max_size=60))
def test_any_text_is_masked_once(text):
    assert masked(masked(text)) == masked(text)


def test_long_texts_take_no_time_to_speak_of():
    began = time.process_time()
    for text in ("a" * 200_000, "a=" * 50_000, "://" * 50_000, "token:" * 50_000, "-----BEGIN PRIVATE KEY-----" * 2000):
        masked(text)
    for text in ("login -p" * 20_000, "--pass " * 30_000, "?t=" * 60_000, "a1" * 100_000, "x_pat_" * 30_000):
        masked(text)
    assert time.process_time() - began < 60  # a quadratic pattern would take hours


TEST = """
@dataclass(frozen=True, kw_only=True)
class Served(Sum):
    env: dict = None
def test_it(perf):
    perf(Served(env={"HF_TOKEN": "geheim12345", "NCCL_ALGO": "Ring"}))
"""


def test_a_run_keeps_no_secret_anywhere(pytester, monkeypatch):
    monkeypatch.setenv("NCCL_PLUGIN_URL", f"https://ann:{GEHEIM}@host")
    repo = repository(pytester, monkeypatch, TEST)
    secrets = ("-o", f"secret={GEHEIM}", "-k", f"test_it or ghp_{GEHEIM}abcdefghijk", "-v")
    files = ("--perf-html=p.html", "--perf-journal=j.jsonl", "--perf-report=r.md", "--perf-summary=s.md")
    found = repo.run(*secrets, *files)
    found.assert_outcomes(passed=1)
    for path in pytester.path.rglob("*"):
        if path.is_file() and path.suffix in (".jsonl", ".html", ".md"):
            assert "geheim" not in path.read_text(), path.name
    journal = read_journal(pytester.path / "j.jsonl")
    assert f"secret={MASK}" in journal.arguments
    (result,) = journal.results.values()
    assert result.parameters["env"] == {"HF_TOKEN": MASK, "NCCL_ALGO": "Ring"}
    again = repo.run("--perf-resume=j.jsonl", "--perf-journal=k.jsonl")
    again.assert_outcomes(passed=1)
    assert len(repo.driver.timed()) == 1, "the case is the same, though its secret is not in the journal"


def test_a_journal_that_was_written_before_shows_none(pytester, monkeypatch, capsys):
    repo = repository(pytester, monkeypatch, "def test_it(perf):\n    perf(step)\n")
    repo.run("--perf-journal=j.jsonl", "-k", "test_it")
    path = pytester.path / "j.jsonl"
    lines = path.read_text().splitlines()
    header = json.loads(lines[0])
    header["header"]["arguments"] = ["--password", GEHEIM]
    path.write_text("\n".join([json.dumps(header), *lines[1:]]) + "\n")
    assert cli.main(["report", str(path), "--html", "p.html"]) == 0
    capsys.readouterr()
    assert "geheim" not in (pytester.path / "p.html").read_text()
    assert "--password ***" in (pytester.path / "p.html").read_text()
