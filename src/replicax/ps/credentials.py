"""Authentication of parameter servers: a shared token, and TLS files.

Every task of a cluster has the same token, which gives access to the model's values. So
logs and errors never show the token, and a file with it must not be world-readable.
"""

import dataclasses
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

__all__ = ["Credentials", "new_token"]

TOKEN = "REPLICAX_PS_TOKEN"
TOKEN_FILE = "REPLICAX_PS_TOKEN_FILE"
TLS_CERTIFICATE = "REPLICAX_PS_TLS_CERT"
TLS_KEY = "REPLICAX_PS_TLS_KEY"
TLS_ROOT = "REPLICAX_PS_TLS_ROOT"

_LEAST_CHARACTERS = 16
_HOW = (
    "Print a new token with `replicax token` and set it in every task "
    f"of the cluster: its text in {TOKEN}, or the path of a file in {TOKEN_FILE}. "
    "`replicax run` does this by itself."
)


def new_token() -> str:
    """A new token for a cluster: 256 random bits as 43 characters."""
    return secrets.token_urlsafe(32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Credentials:
    """The token of a cluster and, for TLS, certificates.

    Attributes:
        token: At least 16 visible ASCII characters. `repr` does not show it.
        tls_certificate: A server's certificate chain, PEM. None: no TLS.
        tls_key: The certificate's private key, PEM.
        tls_root: The certificates that workers trust, PEM. None: no TLS or, with
            `tls_certificate`, the certificates that the machine trusts.
        source: The origin of the token, for errors.

    Raises:
        ValueError: If the token is too short or has other characters, or if only one
            of certificate and key is given.

    Example:
        >>> credentials = Credentials(token=new_token())
        >>> credentials
        Credentials(token=<hidden>, tls=False)
        >>> credentials.accepts("a guess")
        False
    """

    token: str
    tls_certificate: bytes | None = None
    tls_key: bytes | None = None
    tls_root: bytes | None = None
    source: str = "its script"

    def __post_init__(self) -> None:
        if len(self.token) < _LEAST_CHARACTERS:
            raise ValueError(
                f"The token of a parameter-server cluster has {len(self.token)} "
                f"characters, and needs at least {_LEAST_CHARACTERS}. {_HOW}"
            )
        if not all("!" <= character <= "~" for character in self.token):
            raise ValueError(
                "The token of a parameter-server cluster has characters other than "
                f"visible ASCII. {_HOW}"
            )
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError(
                f"TLS needs a certificate ({TLS_CERTIFICATE}) and its key ({TLS_KEY}); "
                "only one of them is given."
            )

    def __repr__(self) -> str:
        return f"Credentials(token=<hidden>, tls={self.tls})"

    @property
    def tls(self) -> bool:
        """Whether the cluster's connections are encrypted."""
        return self.tls_certificate is not None or self.tls_root is not None

    def accepts(self, token: str) -> bool:
        """Whether a caller's token is right; compared in constant time."""
        return hmac.compare_digest(
            self.token.encode(), token.encode("utf-8", "replace")
        )

    def mismatch(self, caller: str, server: str) -> str:
        """Error text for a task whose token differs from a server's."""
        return (
            f"{server} refuses {caller}, whose token differs from the server's; "
            f"it comes from {self.source}. Set the same token in all tasks of the "
            "cluster, and restart the tasks that had another token."
        )

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str] | None = None
    ) -> "Credentials":
        """Read credentials from environment variables.

        `REPLICAX_PS_TOKEN` is the token, or `REPLICAX_PS_TOKEN_FILE` the path of a file
        with it. `REPLICAX_PS_TLS_CERT`, `REPLICAX_PS_TLS_KEY` and
        `REPLICAX_PS_TLS_ROOT` are paths of PEM files: servers need the first two,
        workers the last.

        Args:
            environment: The variables. None: those of this process.

        Raises:
            ValueError: If there is no token, or it is invalid.
            PermissionError: If the file with the token or the key is world-readable.
            OSError: If a file cannot be read.
        """
        variables = os.environ if environment is None else environment
        token, source = _token(variables)
        return cls(
            token=token,
            source=source,
            tls_certificate=_pem(variables, TLS_CERTIFICATE),
            tls_key=_pem(variables, TLS_KEY, secret=True),
            tls_root=_pem(variables, TLS_ROOT),
        )


def _token(variables: Mapping[str, str]) -> tuple[str, str]:
    """The token, and where it comes from."""
    if token := variables.get(TOKEN):
        return token.strip(), TOKEN
    if path := variables.get(TOKEN_FILE):
        token = _read(path, TOKEN_FILE, secret=True).decode("ascii", "replace")
        return token.strip(), f"{path!r}, which {TOKEN_FILE} names"
    raise ValueError(
        f"There is no token for the parameter servers: neither {TOKEN} nor "
        f"{TOKEN_FILE} is set. {_HOW}"
    )


def _pem(
    variables: Mapping[str, str], name: str, *, secret: bool = False
) -> bytes | None:
    path = variables.get(name)
    if not path:
        return None
    data = _read(path, name, secret=secret)
    if b"-----BEGIN " not in data:
        raise ValueError(f"{name} names {path!r}, which is no PEM file.")
    return data


def _read(path: str, name: str, *, secret: bool) -> bytes:
    try:
        with Path(path).open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if secret and os.name == "posix" and mode & 0o007:
                raise PermissionError(
                    f"{name} names {path!r}, which every user of this machine may "
                    f"read (mode {mode:04o}). Run chmod 600 {path}, and create a new "
                    "token or key if others use the machine."
                )
            return file.read(1 << 20)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{name} names {path!r}, and there is no such file."
        ) from error
