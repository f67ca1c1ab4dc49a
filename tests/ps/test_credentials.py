"""Tokens and certificates from the environment, and what is wrong with them."""

import pytest

from replicax.ps.credentials import Credentials, new_token


def secret_file(path, text, mode=0o600):
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_a_token_from_the_environment():
    token = new_token()
    credentials = Credentials.from_environment({"REPLICAX_PS_TOKEN": token})
    assert credentials.accepts(token)
    assert not credentials.accepts(token[:-1])
    assert not credentials.accepts(token + "x")
    assert not credentials.accepts("")
    assert not credentials.accepts("\udcff\u00e9")
    assert not credentials.tls


def test_a_token_from_a_file(tmp_path):
    token = new_token()
    path = secret_file(tmp_path / "token", token + "\n")
    assert Credentials.from_environment({"REPLICAX_PS_TOKEN_FILE": path}).accepts(token)


def test_no_token_is_an_error_that_says_how_to_make_one():
    with pytest.raises(ValueError, match=r"REPLICAX_PS_TOKEN.*`replicax token`"):
        Credentials.from_environment({})


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o606])
def test_a_token_file_that_others_may_read_is_an_error(tmp_path, mode):
    path = secret_file(tmp_path / "token", new_token(), mode)
    with pytest.raises(PermissionError, match="chmod 600"):
        Credentials.from_environment({"REPLICAX_PS_TOKEN_FILE": path})


def test_a_token_file_that_is_not_there_is_named():
    with pytest.raises(FileNotFoundError, match="REPLICAX_PS_TOKEN_FILE names '/no/"):
        Credentials.from_environment({"REPLICAX_PS_TOKEN_FILE": "/no/such/file"})


@pytest.mark.parametrize(
    ("token", "why"),
    [
        ("", "has 0 characters"),
        ("short", "has 5 characters"),
        ("with a space in it, long enough", "visible ASCII"),
        ("with-an-umlaut-\u00fc-long-enough", "visible ASCII"),
        ("with-a-line-break\nlong-enough", "visible ASCII"),
    ],
)
def test_a_weak_or_odd_token_is_refused_and_not_shown(token, why):
    with pytest.raises(ValueError, match=why) as caught:
        Credentials(token=token)
    assert not token or token not in str(caught.value)


def test_the_token_and_the_key_are_never_shown(tmp_path):
    key = "-----BEGIN PRIVATE KEY-----\nsecret-key\n-----END PRIVATE KEY-----"
    token = new_token()
    credentials = Credentials(
        token=token, tls_certificate=b"-----BEGIN ", tls_key=key.encode()
    )
    for text in (repr(credentials), str(credentials), f"{[credentials]}"):
        assert token not in text
        assert "secret-key" not in text
    assert "tls=True" in repr(credentials)


def test_tls_files(tmp_path):
    pem = "-----BEGIN CERTIFICATE-----\n"
    environment = {
        "REPLICAX_PS_TOKEN": new_token(),
        "REPLICAX_PS_TLS_CERT": secret_file(tmp_path / "cert", pem, 0o644),
        "REPLICAX_PS_TLS_KEY": secret_file(tmp_path / "key", pem),
        "REPLICAX_PS_TLS_ROOT": secret_file(tmp_path / "root", pem, 0o644),
    }
    credentials = Credentials.from_environment(environment)
    assert credentials.tls
    assert credentials.tls_root == pem.encode()
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(PermissionError, match="REPLICAX_PS_TLS_KEY"):
        Credentials.from_environment(environment)
    del environment["REPLICAX_PS_TLS_KEY"]
    with pytest.raises(ValueError, match="only one of them"):
        Credentials.from_environment(environment)
    environment["REPLICAX_PS_TLS_ROOT"] = secret_file(tmp_path / "not", "text")
    del environment["REPLICAX_PS_TLS_CERT"]
    with pytest.raises(ValueError, match="is no PEM file"):
        Credentials.from_environment(environment)
