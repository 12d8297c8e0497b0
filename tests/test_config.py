import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longhaul.config import MAX_CACHE_BYTES, Config, parse_cache, parse_caches
from longhaul.errors import ConfigError

UNITS = {"": 2**30, "B": 1, "K": 2**10, "MiB": 2**20, "g": 2**30, "GiB": 2**30, " TiB": 2**40}


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("auto", None),
        (" Auto ", None),
        ("2", 2 * 2**30),
        ("0.5", 2**29),
        (".5", 2**29),
        ("2.", 2 * 2**30),
        ("24GiB", 24 * 2**30),
        ("24 gib", 24 * 2**30),
        ("512MiB", 512 * 2**20),
        ("1.5G", 3 * 2**29),
        ("100B", 100),
        ("1T", 2**40),
        ("0.1", 107374182),
    ],
)
def test_sizes_as_users_type_them(text: str, size_bytes: int | None) -> None:
    assert parse_cache(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "-1", "-0.5G", "nan", "inf", "1e3", "two", "2 3", "2GB", "2XiB", ".", "1.2.3"),
        *("0x10", "\u0663", "1_000", "+2", "2\n3", "9" * 5000),
    ],
)
def test_what_is_not_a_size_is_refused_with_the_value_and_what_is_accepted(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_cache(text)
    message = str(caught.value)
    assert repr(text) in message
    assert "auto" in message and "512MiB" in message and "0.5" in message
    assert "\n" not in message


@pytest.mark.parametrize("text", ["0", "0.0", "0GiB", "0.3B", "0.0000000001"])
def test_zero_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is 0 bytes"):
        parse_cache(text)


def test_more_than_the_native_side_can_count_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"more than {MAX_CACHE_BYTES}"):
        parse_cache("8388608T")


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.sampled_from(sorted(UNITS)), st.booleans())
def test_every_written_size_is_its_exact_value_rounded_down(
    whole: int, part: int, unit: str, upper: bool
) -> None:
    number = f"{whole}.{part}"
    exact = int(Fraction(number) * UNITS[unit])
    text = number + (unit.upper() if upper else unit)
    if exact == 0:
        with pytest.raises(ConfigError):
            parse_cache(text)
    else:
        assert parse_cache(text) == exact


@given(st.text("0159.GMKTiBauto -+en", max_size=12))
def test_any_text_gives_a_size_or_a_one_line_refusal(text: str) -> None:
    try:
        size_bytes = parse_cache(text)
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert size_bytes is None or 0 < size_bytes <= MAX_CACHE_BYTES


def test_defaults() -> None:
    config = Config()
    assert (config.cache_bytes, config.n_io_threads, config.policy) == (None, 4, "lru")
    assert config.uncached


@pytest.mark.parametrize("size_bytes", [0, -1, MAX_CACHE_BYTES + 1])
def test_cache_bytes_out_of_range_are_refused(size_bytes: int) -> None:
    with pytest.raises(ConfigError, match=str(size_bytes)):
        Config(cache_bytes=size_bytes)


@pytest.mark.parametrize("n_io_threads", [0, -4, 257])
def test_read_threads_out_of_range_are_refused(n_io_threads: int) -> None:
    with pytest.raises(ConfigError, match=f"{n_io_threads} read threads"):
        Config(n_io_threads=n_io_threads)


def test_a_policy_without_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="policy"):
        Config(policy="")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("auto", (None, {})),
        ("2", (2 * 2**30, {})),
        ("CPU=2", (None, {"CPU": 2 * 2**30})),
        ("CPU=2,Vulkan0=512MiB", (None, {"CPU": 2 * 2**30, "Vulkan0": 2**29})),
        ("CPU=2/Vulkan0=512MiB", (None, {"CPU": 2 * 2**30, "Vulkan0": 2**29})),
        (" RPC0 = 1.5 , RPC1 = .5 ", (None, {"RPC0": 3 * 2**29, "RPC1": 2**29})),
    ],
)
def test_a_cache_has_one_size_or_one_for_each_device(
    text: str, found: tuple[int | None, dict[str, int]]
) -> None:
    assert parse_caches(text) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("CPU=", "'CPU=' is not a device and its size"),
        ("=2", "'=2' is not a device and its size"),
        ("CPU=2,3", "'3' is not a device and its size"),
        ("CPU=auto", "leave out what is to be auto"),
        ("CPU=2,", "'' is not a device and its size"),
        ("CPU=many", "cache size 'many' is not a size"),
        ("CPU=1,cpu=2", "cpu is given two sizes"),
        ("CPU=2=3", "cache size '2=3' is not a size"),
    ],
)
def test_sizes_by_device_that_cannot_be_read_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_caches(text)


def test_one_size_and_sizes_by_device_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="not both"):
        Config(cache_bytes=1, cache_by_device={"CPU": 1})
