"""Which AWS credentials a bucket is read with: those that the usual places hold, looked up without waiting for one.

tensorstore's own search asks the metadata service of EC2 wherever nothing else is found, which hangs for minutes on
machines that have none, and writes a log line for every file that it misses. So the places are searched here, in the
order of AWS's tools, and tensorstore is told which one to take.
"""

from __future__ import annotations

import configparser
import functools
import http.client
import os
from pathlib import Path
from urllib.parse import urlparse


_METADATA_SERVICE = "http://169.254.169.254"
_METADATA_SECONDS = 1.0
_ROLES = "/latest/meta-data/iam/security-credentials/"
# What a profile must hold, one of them, for tensorstore to get credentials from it.
_PROFILE_KEYS = ("aws_access_key_id", "source_profile", "credential_source")


def choose_credentials() -> tuple[dict[str, str], str | None]:
    """
    The credentials of this process and machine: the environment's, those of a profile of `~/.aws`, of a web identity
    token, of a container, of the role of an EC2 machine, or none, which is enough for a public bucket.

    Returns:
        tensorstore's `aws_credentials`, and what they are in words; None for none.
    """
    environment = os.environ.get
    if environment("AWS_ACCESS_KEY_ID") and environment("AWS_SECRET_ACCESS_KEY"):
        return {"type": "environment"}, "the credentials in the environment (AWS_ACCESS_KEY_ID)"
    name = environment("AWS_PROFILE") or environment("AWS_DEFAULT_PROFILE") or "default"
    if (files := _profile_files(name)) is not None:
        return {"type": "profile", "profile": name, **files}, f"the credentials of the AWS profile {name!r}"
    if environment("AWS_WEB_IDENTITY_TOKEN_FILE") and environment("AWS_ROLE_ARN"):
        return {"type": "default"}, "the web identity token (AWS_WEB_IDENTITY_TOKEN_FILE)"
    if environment("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI") or environment("AWS_CONTAINER_CREDENTIALS_FULL_URI"):
        return {"type": "ecs"}, "the credentials of the container"
    is_asked = environment("AWS_EC2_METADATA_DISABLED", "").lower() != "true"
    if is_asked and _has_role(environment("AWS_EC2_METADATA_SERVICE_ENDPOINT") or _METADATA_SERVICE):
        return {"type": "imds"}, "the credentials of the machine's role"
    return {"type": "anonymous"}, None


def _profile_files(name: str) -> dict[str, str] | None:
    """The files of the profiles, if the one of this name holds credentials; a file that is missing as an empty one."""
    places = {
        "credentials_file": (os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials", name),
        "config_file": (
            os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config",
            name if name == "default" else f"profile {name}",
        ),
    }
    files, is_usable = {}, False
    for key, (place, section) in places.items():
        path = Path(place).expanduser()
        files[key] = str(path) if path.is_file() else os.devnull
        profiles = configparser.RawConfigParser(strict=False)
        try:
            profiles.read_string(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, configparser.Error):
            continue
        is_usable |= any(profiles.has_option(section, option) for option in _PROFILE_KEYS)
    return files if is_usable else None


@functools.lru_cache
def _has_role(service: str) -> bool:
    """Whether the metadata service of EC2 is there and the machine has a role; both answer at once where they do."""
    url = urlparse(service)
    try:
        connection = http.client.HTTPConnection(url.hostname or "", url.port or 80, timeout=_METADATA_SECONDS)
        with_token = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
        connection.request("PUT", "/latest/api/token", headers=with_token)
        answer = connection.getresponse()
        token = answer.read().decode("ascii", "replace")
        headers = {"X-aws-ec2-metadata-token": token} if answer.status == 200 else {}
        connection.request("GET", _ROLES, headers=headers)
        answer = connection.getresponse()
        return answer.status == 200 and bool(answer.read().strip())
    except (OSError, http.client.HTTPException, ValueError):
        return False
