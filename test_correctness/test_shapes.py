"""Shapes of the user's own: the file's format, its mistakes by line and rule, and the cases that become of it."""

import pytest

from perfsuite.base.errors import ConfigurationError
from perfsuite.plugin.options import read_shapes
from perfsuite.plugin.sweep import Size, Sweep

MATMUL = Sweep(
    size_param="shape",
    full=(Size(value=(8, 8, 8), id="8x8x8"),),
    small=(Size(value=(4, 4, 4), id="4x4x4"),),
    extended_sizes=(Size(value=(4, 4, 4), id="4x4x4"),),
    dtypes=("fp32", "bf16"),
)


def written(tmp_path, text):
    path = tmp_path / "shapes.txt"
    path.write_text(text)
    return path


def test_shapes_replace_the_sizes_of_the_test_that_they_name_and_of_no_other(tmp_path):
    text = "# mine\n\ntest_matmul 16x32x64 # gate\ntest_other 8x8\ntest_matmul 1x2x3\n"
    file = read_shapes(written(tmp_path, text))
    sweep = file.apply("test_matmul", MATMUL)
    for scale in ("full", "small"):
        points = list(sweep.points(scale))
        assert ["16x32x64-fp32", "16x32x64-bf16", "1x2x3-fp32", "1x2x3-bf16"] == [point.id for point in points]
        assert not any(point.extended for point in points)
    assert ((16, 32, 64), "fp32") == next(iter(sweep.points("small"))).values
    assert MATMUL is file.apply("test_softmax", MATMUL)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", r"shapes.txt has no shape; write a line such as: test_matmul"),
        ("# only this\n", r"has no shape"),
        ("\ntest_matmul\n", r"line 2: has 1 words; write a test's name and one shape"),
        ("test_matmul 4x4 bf16\n", r"line 1: has 3 words"),
        ("test_matmul 4*4\n", r"line 1: '4\*4' is not a shape; write whole numbers with x between"),
        ("test_matmul 4x-4\n", r"line 1: '4x-4' is not a shape"),
        ("test_matmul 4x4.5\n", r"line 1: '4x4.5' is not a shape"),
        ("test_matmul 4x0x4\n", r"line 1: 4x0x4 has a 0; a dimension is at least 1"),
        ("4x4 test_matmul\n", r"line 1: '4x4' is not the name of a test function"),
        ("t 4x4\n\nt 04x4\n", r"line 3: t has 4x4 in line 1 already; write each shape once"),
    ],
)
def test_a_mistake_is_one_line_with_its_number_and_the_rule(tmp_path, text, said):
    with pytest.raises(pytest.UsageError, match=said) as caught:
        read_shapes(written(tmp_path, text))
    assert str(caught.value).startswith("--perf-shapes: ")
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(pytest.UsageError, match=r"no.txt cannot be read: No such file"):
        read_shapes(tmp_path / "no.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(pytest.UsageError, match=r"latin.txt is not UTF-8 at byte 3"):
        read_shapes(tmp_path / "latin.txt")


def test_what_does_not_fit_its_test_names_the_line(tmp_path):
    file = read_shapes(written(tmp_path, "test_matmul 4x4x4\ntest_matmul 4x4\n"))
    with pytest.raises(ConfigurationError, match=r"line 2: test_matmul takes 3 numbers, as in 8x8x8, not 4x4"):
        file.apply("test_matmul", MATMUL)
    bytes_only = Sweep(size_param="message_bytes", full=(Size(value=1024, id="1KiB"),), small=())
    with pytest.raises(ConfigurationError, match=r"line 1: test_matmul has no sizes that are shapes"):
        file.apply("test_matmul", bytes_only)
    with pytest.raises(ConfigurationError, match=r"line 1: .*'test_matmul'; did you mean test_matmul_fp8"):
        file.require_known(["test_matmul_fp8", "test_kernel_launch"])
    file.require_known(["test_matmul"])


TEST = """
from perfsuite import sizes
from perfsuite.workloads.matmul import Matmul

@sizes(full=["64x64x64"], small=["32x32x32"], param="shape")
def test_product(perf, shape):
    m, k, n = shape
    perf(Matmul(m=m, k=k, n=n))
"""


def test_the_file_makes_the_cases_of_a_run(pytester):
    pytester.makepyfile(TEST)

    def collected(text):
        (pytester.path / "mine.txt").write_text(text)
        collect = ("--collect-only", "-q", "--perf-platform=cpu")
        return pytester.runpytest_inprocess("--perf-shapes=mine.txt", *collect)

    collected("test_product 8x16x24\n").stdout.fnmatch_lines(["*::test_product[[]cpu-8x16x24]"])
    says = "ERROR: --perf-shapes: *line 1: *'test_produkt'; did you mean test_product?*"
    collected("test_produkt 8x16x24\n").stderr.fnmatch_lines([says])
    says = "*line 1: test_product takes 3 numbers, as in 64x64x64, not 8"
    collected("test_product 8\n").stdout.fnmatch_lines([says])
