import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieval_server.tokenizer import normalize, tokenize

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=200)  # lone surrogates and NUL included


@pytest.mark.parametrize(
    ("written", "asked"),
    [
        ("São Paulo", "Sao Paulo"),
        ("São Paulo", "SÃO PAULO"),
        (unicodedata.normalize("NFD", "Zürich"), "Zurich"),
        ("Łódź", "Lodz"),
        ("Tromsø", "TROMSO"),
        ("Ｔｏｋｙｏ", "tokyo"),
        ("Sana’a", "Sana'a"),
        ("Sanaʿa", "Sanaa"),
        ("O’Brien", "OBrien"),
        ("2,138,551", "2138551"),
        ("Weißenburg", "WEISSENBURG"),
        ("Ljubljana", "Ǉubljana"),
        ("ﬁ", "fi"),
    ],
)
def test_spellings_of_one_name_give_the_same_tokens(written: str, asked: str) -> None:
    assert tokenize(written) == tokenize(asked) != []


@pytest.mark.parametrize(
    ("query", "tokens"),
    [
        ("The Hague", ["the", "hague"]),
        ("Of", ["of"]),
        ("Winston-Salem", ["winston", "salem"]),
        ("Paris's", ["pariss", "paris"]),
        ("phone code +44-1481", ["phone", "code", "44", "1481"]),
        ("America/Sao_Paulo", ["america", "sao", "paulo"]),
        ("1,2 and 1,23456", ["1", "2", "and", "1", "23456"]),
        ("東京", ["東", "京", "東京"]),
        ("東京Tokyo", ["東", "京", "東京", "tokyo"]),
        ("サン", ["サ", "ン", "サン"]),
        ("हिन्दी", ["हिन्दी"]),
        ("", []),
        ("?! \0 …", []),
        ("🙂", []),
    ],
)
def test_tokens(query: str, tokens: list[str]) -> None:
    assert tokenize(query) == tokens


def test_voicing_marks_are_part_of_the_word() -> None:
    assert tokenize("が") != tokenize("か")


@pytest.mark.parametrize(
    "query", ["한국의 수도", "กรุงเทพ", "Москва", "القاهرة", "ภูเก็ต", "မြန်မာ", "ភ្នំពេញ", "תל אביב", "አዲስ አበባ"]
)
def test_every_script_gives_tokens(query: str) -> None:
    assert tokenize(query)


@given(ANY_TEXT)
def test_any_text_gives_clean_tokens(text: str) -> None:
    for token in tokenize(text):
        assert token
        assert not any(character.isspace() or character == "'" for character in token)


@given(ANY_TEXT, ANY_TEXT)
def test_a_space_separates_texts(left: str, right: str) -> None:
    assert tokenize(f"{left} {right}") == tokenize(left) + tokenize(right)


@given(st.text(max_size=100))
def test_unicode_forms_do_not_matter(text: str) -> None:
    assert tokenize(unicodedata.normalize("NFC", text)) == tokenize(unicodedata.normalize("NFD", text))


@given(st.text(max_size=100))
def test_any_letter_or_digit_gives_a_token(text: str) -> None:
    if any(character.isalnum() for character in normalize(text)):
        assert tokenize(text)


def test_only_the_standard_library_is_needed() -> None:
    import subprocess

    code = (
        "import sys; from retrieval_server.tokenizer import tokenize; tokenize('é');"
        "sys.exit(any(m.split('.')[0] in ('bm25s', 'numpy', 'torch', 'regex') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
