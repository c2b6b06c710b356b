"""Proxies of the environment: checks connect as a SuperNode does, and errors name the proxy and a remedy that works."""

import shlex

import httpx
import pytest

from fedssl.errors import InputError
from fedssl.fleet.kit import make_kit, write_kit
from fedssl.fleet.proxy import check_proxies
from tests.flower import free_port


def setup(device, keys, images, folder, server):
    kit = make_kit("garden", server, certificate=keys / "ca.crt")
    (folder / "garden.kit").unlink(missing_ok=True)
    write_kit(kit, folder / "garden.kit")
    return device("setup", folder / "garden.kit", f"images={images}", f"folder={folder / 'device'}")


def run(command, environment):
    """Run ``export NAME=VALUE``."""
    word, assignment = shlex.split(command)
    assert word == "export"
    environment.setenv(*assignment.split("=", 1))


@pytest.fixture
def arguments(device, keys, images, tmp_path, server):
    return device, keys, images, tmp_path, server


def test_setup_connects_through_the_proxy_of_the_supernode(arguments, proxy, environment, tmp_path):
    environment.setenv("https_proxy", f"http://me:secret@{proxy.address}")
    status, text = setup(*arguments)
    assert status == 0, text
    assert f"answers through https_proxy=http://{proxy.address}, and its certificate is valid" in text
    assert "secret" not in text
    assert proxy.connected == [arguments[-1]]
    # The unit of systemd gets the same proxy, also if `status` runs in another shell.
    file = tmp_path / "device" / "node.env"
    assert f"https_proxy=http://me:secret@{proxy.address}\n" in file.read_text()
    assert file.stat().st_mode & 0o077 == 0
    environment.delenv("https_proxy")
    assert arguments[0]("status", f"folder={tmp_path / 'device'}")[0] == 0
    assert len(proxy.connected) == 2


def test_a_proxy_of_the_devices_own_connections_is_a_problem(arguments, proxy, environment):
    environment.setenv("http_proxy", f"http://me:secret@{proxy.address}")
    status, text = setup(*arguments)
    assert status == 1
    command = "export NO_PROXY=127.0.0.1"
    own = f"http_proxy=http://{proxy.address} would receive the connections within this device (127.0.0.1)"
    assert f"{own}; run {command}" in text
    run(command, environment)
    status, text = setup(*arguments)
    assert status == 0, text


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (403, "(403 Forbidden); allow the connection there, or run export NO_PROXY=fed.example.org if"),
        (407, "(407 Proxy Authentication Required); set HTTPS_PROXY to http://NAME:PASSWORD@HOST:PORT of that proxy"),
        (None, "Connection refused); allow the connection there"),
    ],
)
def test_a_failing_proxy_is_named_without_its_password(arguments, proxy, environment, status, sentence):
    proxy.status = status
    port = free_port() if status is None else proxy.server_address[1]
    environment.setenv("HTTPS_PROXY", f"http://me:se@cret@127.0.0.1:{port}")
    result, text = setup(*arguments[:-1], "fed.example.org:443")
    assert result == 1
    assert f"fed.example.org:443 cannot be reached through the proxy HTTPS_PROXY=http://127.0.0.1:{port} (" in text
    assert sentence in text
    assert "cret" not in text


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"ALL_PROXY": "socks5://me:pass@p:1080"}, "^ALL_PROXY=socks5://p:1080 needs the package socksio, .* or unset"),
        ({"ALL_PROXY": "SOCKS5://p:1080"}, "^ALL_PROXY=SOCKS5://p:1080 needs the package socksio"),
        (
            {"all_proxy": "socks://p:1080"},
            "^all_proxy=socks://p:1080 is not a proxy that Flower can use; set all_proxy",
        ),
        ({"HTTPS_PROXY": "http://me:se#cret@p:1"}, "^HTTPS_PROXY=http://p:1 is not .* special characters are percent"),
        ({"HTTP_PROXY": "p:1", "HTTPS_PROXY": "http://p:port"}, "^HTTPS_PROXY=http://p:port is not a proxy"),
        ({"NO_PROXY": "[::1]"}, r"^NO_PROXY=\[::1\] cannot be read by Flower .* IPv6 without brackets"),
        ({"NO_PROXY": "a.org,fe80::/10"}, "^NO_PROXY=a.org,fe80::/10 cannot be read by Flower"),
    ],
)
def test_proxies_that_flower_cannot_use(environment, variables, sentence):
    for name, value in variables.items():
        environment.setenv(name, value)
    with pytest.raises((ImportError, ValueError, httpx.InvalidURL)):
        httpx.Client()  # as in a SuperNode
    with pytest.raises(InputError, match=sentence) as refused:
        check_proxies()
    assert "cret" not in str(refused.value)


def test_commands_name_a_proxy_before_a_local_superlink(operator, proxy, environment):
    environment.setenv("http_proxy", f"http://{proxy.address}")
    environment.setenv("no_proxy", "localhost")
    port = free_port()
    status, text = operator("list", "--address", f"127.0.0.1:{port}")
    assert status == 2
    command = "export no_proxy=localhost,127.0.0.1"
    assert text == (
        f"fedssl-fleet: --address=127.0.0.1:{port} cannot be reached through the proxy "
        f"http_proxy=http://{proxy.address} (status 502); run {command}, also before the SuperLink is started\n"
    )
    run(command, environment)
    assert "no SuperLink answers at --address" in operator("list", "--address", f"127.0.0.1:{port}")[1]
