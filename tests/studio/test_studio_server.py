import http.client
import json
import os
from pathlib import Path
from typing import Any

import pytest

from harness.cases import from_table
from shardwise.errors import UserError
from shardwise.small_files import MOST
from shardwise.studio.server import Studio


def ask(
    studio: Studio, path: str, method: str = "GET", body: bytes | None = None, **headers: str
) -> tuple[int, Any, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", studio.server_port, timeout=20)
    connection.putrequest(method, path, skip_host="Host" in headers)
    headers = {"Cookie": f"{studio.cookie}={studio.token}"} | headers
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    if body is not None:
        connection.putheader("Content-Length", str(len(body)))
    connection.endheaders(body)
    reply = connection.getresponse()
    content = reply.read()
    connection.close()
    return reply.status, reply.headers, content


def test_the_page_forbids_everything_outside(studio: Studio) -> None:
    status, headers, body = ask(studio, "/")
    policy = headers["Content-Security-Policy"]
    assert status == 200 and b"<!doctype html>" in body
    assert policy.startswith("default-src 'none'; script-src 'self'") and "connect-src 'self'" in policy
    assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("cookie", ["", "nothing", "shardwise-1=x", "{name}=", "{name}=wrong", "{name}={token}x"])
def test_another_user_of_the_machine_gets_403_and_learns_no_path(studio: Studio, cookie: str) -> None:
    given = cookie.format(name=studio.cookie, token=studio.token)
    answers = {
        ask(studio, path, Cookie=given)[2]
        for path in (
            "/",
            "/?token=",
            "/?token=wrong",
            "/static/app.js",
            "/static/nothing.js",
            "/api/runs",
            "/api/plan",
            "/x",
        )
    }
    codes = {
        ask(studio, path, Cookie=given)[0] for path in ("/", "/api/runs", "/api/runs/events?run=first", "/nothing")
    }
    codes.add(ask(studio, "/api/open", "POST", b"[]", X_Studio="open", Cookie=given)[0])
    assert codes == {403} and len(answers) == 1, "one answer, whatever there is"
    assert b"first" not in (one := answers.pop()) and b"/" not in one


def test_the_printed_address_becomes_a_cookie(studio: Studio) -> None:
    status, headers, body = ask(studio, f"/?token={studio.token}", Cookie="")
    assert (status, headers["Location"], body) == (302, "/", b"")
    kept, *rules = headers["Set-Cookie"].split("; ")
    assert rules == ["HttpOnly", "SameSite=Strict", "Path=/"] and studio.address.endswith(f"/?token={studio.token}")
    assert ask(studio, "/", Cookie=kept)[0] == 200 and len(studio.token) == 48
    with Studio(0) as other:
        assert other.token != studio.token


@from_table
def test_no_path_leads_out(studio: Studio, path: str) -> None:
    status, _, body = ask(studio, path)
    assert status == 404 and json.loads(body)["error"]


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "127.0.0.1:1", "", "[::1]"])
def test_other_hosts_are_refused(studio: Studio, host: str) -> None:
    for path in ("/", "/api/memory", "/static/app.js"):
        assert ask(studio, path, Host=host)[0] == 403


def test_other_origins_are_refused(studio: Studio) -> None:
    assert ask(studio, "/api/pipelines", Origin="http://evil.example")[0] == 403
    assert ask(studio, "/api/pipelines", Origin=studio.origin.rstrip("/"))[0] == 200
    assert ask(studio, "/api/pipelines", Host=f"localhost:{studio.server_port}")[0] == 200


@pytest.mark.parametrize(
    ("site", "status"), [("same-origin", 200), ("none", 200), ("same-site", 403), ("cross-site", 403)]
)
def test_another_site_is_refused_by_what_the_browser_says_of_it(studio: Studio, site: str, status: int) -> None:
    for path in ("/", "/static/app.js", "/api/pipelines?ranks=2&micro=2"):
        assert ask(studio, path, Sec_Fetch_Site=site)[0] == status
    upload = ask(studio, "/api/open", "POST", b"[]", X_Studio="open", Sec_Fetch_Site=site)
    assert upload[0] == (400 if status == 200 else 403)


def test_only_small_regular_files_are_read(studio: Studio, tmp_path: Path) -> None:
    pipe, large = tmp_path / "pipe", tmp_path / "large"
    os.mkfifo(pipe)
    os.mkfifo(tmp_path / "cluster.toml")
    with large.open("wb") as file:
        file.truncate(MOST + 1)
    for view in ("plan", "memory", "tokens"):
        for path, line in (
            (pipe, "not a regular file"),
            ("/dev/null", "not a regular file"),
            (large, "larger than 16"),
        ):
            status, _, body = ask(studio, f"/api/{view}?model={path}")
            assert status == 400 and line in json.loads(body)["error"]
    status, _, body = ask(studio, f"/api/plan?cluster={tmp_path}/cluster.toml")
    assert status == 400 and "not a regular file" in json.loads(body)["error"]


@from_table
def test_a_mistake_is_a_400_with_one_line(studio: Studio, path: str, line: str) -> None:
    status, _, body = ask(studio, path)
    told = json.loads(body)["error"]
    assert status == 400 and line in told and "\n" not in told


def test_uploads_need_a_length_and_come_from_the_page(studio: Studio) -> None:
    assert ask(studio, "/api/open", "POST", b"[]")[0] == 404
    assert ask(studio, "/api/open", "POST", None, X_Studio="open")[0] == 404
    status, _, body = ask(studio, "/api/open", "POST", b"[]", X_Studio="open")
    assert status == 400 and "no event" in json.loads(body)["error"]
    assert ask(studio, "/api/open", "POST", None, X_Studio="open", Content_Length="999999999999")[0] == 413


def test_a_port_that_is_taken_is_said_so(studio: Studio) -> None:
    with pytest.raises(UserError, match="cannot listen on port"):
        Studio(studio.server_port)
    with pytest.raises(UserError, match="a port is 0 to 65535"):
        Studio(70_000)
