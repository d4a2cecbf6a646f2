"""HTTP to a serving engine with the standard library: JSON, and streamed completions with the time of every
delivery.
"""

import http.client
import json
import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from drafttrain.errors import UserError

BODY_SHOWN = 400
BUSY = (408, 429, 500, 502, 503, 504)


class EngineError(UserError):
    """A serving engine that cannot be reached, refuses what it is asked, or gives up on the way."""


class EngineLostError(EngineError):
    """An engine that was there and no longer answers."""


class EngineBusyError(EngineError):
    """An engine that may answer when it is asked again: it is overloaded, restarting or has failed this once."""


@dataclass(frozen=True)
class Server:
    """A serving engine's address. api_key is sent as a bearer token; timeout: seconds without a byte."""

    url: str
    api_key: str | None = None
    timeout: float = 600.0

    def __post_init__(self):
        parts = urlsplit(self.url)
        try:
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # urlsplit reads the port only when it is asked for.
            usable = False
        if not usable:
            raise EngineError(f"the server's address is {self.url!r}; expected one like http://localhost:8000")

    def get(self, path: str) -> str | None:
        """The body of GET path; None where the server has or gives no such page. EngineError where it says why not."""
        connection, response = self._request("GET", path)
        try:
            body = _read(response, self.url)
        finally:
            connection.close()
        if response.status in (404, 405, 501):
            return None
        _check(response.status, body, f"GET {path}", self.url)
        return body

    def get_json(self, path: str) -> Any:
        """The same, read as JSON."""
        body = self.get(path)
        try:
            return None if body is None else json.loads(body)
        except json.JSONDecodeError as error:
            raise EngineError(
                f"{self.url}{path} answered {body[:BODY_SHOWN]!r}; expected JSON. Mend: give the address of the "
                "engine's OpenAI endpoint, without /v1"
            ) from error

    def post_json(self, path: str, body: Mapping[str, Any]) -> Any:
        """POSTs a JSON body and reads the JSON answer. EngineBusyError or EngineLostError where another try may help,
        EngineError for a refusal.
        """
        connection, response = self._request("POST", path, json.dumps(body))
        try:
            text = _read(response, self.url)
        finally:
            connection.close()
        _check(response.status, text, f"POST {path}", self.url)
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise EngineError(f"{self.url}{path} answered {text[:BODY_SHOWN]!r}; expected JSON") from error

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[tuple[float, dict[str, Any]]]:
        """POSTs a JSON body and yields (time.perf_counter(), event) for each server-sent event until [DONE].

        EngineError for a refusal or an error event; EngineLostError where the stream breaks off before [DONE].
        """
        connection, response = self._request("POST", path, json.dumps(body))
        try:
            if response.status != 200:
                _check(response.status, _read(response, self.url), f"POST {path}", self.url)
            while True:
                try:
                    line = response.readline()
                except (OSError, http.client.HTTPException) as error:
                    raise _lost(self.url, error) from error
                now = time.perf_counter()
                if not line:
                    raise EngineLostError(
                        f"{self.url} broke off in the middle of an answer. Mend: see the server's log"
                    )
                if not line.startswith(b"data:"):
                    continue
                text = line.removeprefix(b"data:").strip().decode()
                if text == "[DONE]":
                    return
                try:
                    event = json.loads(text)
                except json.JSONDecodeError as error:
                    raise EngineError(f"{self.url} sent {text[:BODY_SHOWN]!r}; expected JSON events") from error
                if "error" in event:
                    raise EngineError(f"{self.url} gave up on a prompt: {json.dumps(event['error'])[:BODY_SHOWN]}")
                yield now, event
        finally:
            connection.close()

    def _request(self, method: str, path: str, body: str | None = None):
        parts = urlsplit(self.url)
        if parts.scheme == "https":
            connection = http.client.HTTPSConnection(
                parts.hostname, parts.port, timeout=self.timeout, context=ssl.create_default_context()
            )
        else:
            connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=self.timeout)
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        base = parts.path.rstrip("/").removesuffix("/v1")
        try:
            connection.request(method, base + path, body, headers)
            return connection, connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise _lost(self.url, error) from error


def _lost(url: str, error: Exception) -> EngineLostError:
    return EngineLostError(
        f"{url} does not answer ({type(error).__name__}: {error}). Expected a running vLLM or SGLang server. "
        "Mend: start it, wait until it has loaded the model, and check host and port"
    )


def _read(response: http.client.HTTPResponse, url: str) -> str:
    try:
        return response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise _lost(url, error) from error


def _check(status: int, body: str, what: str, url: str) -> None:
    """EngineError with the server's own words, unless all is well."""
    if status == 200:
        return
    mends = {
        400: "the message says which setting the server refuses: shorten the prompt, or lower max_new_tokens",
        401: "give the server's key: --api-key, or OPENAI_API_KEY in the environment",
        403: "give the server's key: --api-key, or OPENAI_API_KEY in the environment",
        404: "check the model's name (see /v1/models) and the address",
        422: "the message says which field this server does not know; try another release of it",
    }
    mend = mends.get(status, "see the server's log")
    kind = EngineBusyError if status in BUSY else EngineError
    raise kind(f"{what} at {url} answered {status}: {body.strip()[:BODY_SHOWN]}. Mend: {mend}")
