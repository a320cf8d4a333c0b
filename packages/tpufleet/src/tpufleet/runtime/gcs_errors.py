"""Translates errors of the Cloud Storage client into ours, with what to do about each."""

from __future__ import annotations

import http.client
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from tpufleet.errors import (
    BadRequest,
    PermissionMissing,
    ProviderUnavailable,
    missing,
    no_credentials,
)

_PERMISSION = re.compile(r"storage\.[a-zA-Z]+\.[a-zA-Z]+(?= access|'? denied| is denied)")

_RETENTION = (
    "a retention policy protects the object: wait until it expires, or use a bucket without one"
)
_HOLD = (
    "a hold protects the object: release it with `gcloud storage objects update OBJECT "
    "--no-temporary-hold --no-event-based-hold`, or use another bucket"
)
_BILLING = (
    "billing is disabled for the project of the bucket: enable it with `gcloud billing projects "
    "link PROJECT --billing-account ACCOUNT`"
)
_REQUESTER_PAYS = (
    "buckets with Requester Pays are not supported: disable it with `gcloud storage buckets update "
    "BUCKET --no-requester-pays`, or use another bucket"
)
# What to do about reasons for 400 and 403 that no role changes
# (cloud.google.com/storage/docs/json_api/v1/status-codes). Some answers have only words.
_REFUSALS = {
    "retentionPolicyNotMet": _RETENTION,
    "retention policy": _RETENTION,
    "objectUnderActiveHold": _HOLD,
    "hold and cannot be": _HOLD,
    "accountDisabled": _BILLING,
    "billing account": _BILLING,
    "requester pays": _REQUESTER_PAYS,
    "UserProjectMissing": _REQUESTER_PAYS,
}


def compressed(what: str) -> BadRequest:
    return BadRequest(
        f"{what} is stored with Content-Encoding: gzip, of which parts cannot be read; upload "
        "it uncompressed, without --gzip-local and --gzip-local-all"
    )


@contextmanager
def translate_errors(what: str) -> Iterator[None]:
    """Translate Google's errors into ours."""
    import requests
    import urllib3
    from google.api_core import exceptions
    from google.auth import exceptions as auth
    from google.cloud.storage.exceptions import DataCorruption

    try:
        yield
    except exceptions.NotFound as error:
        raise missing(what) from error
    except (auth.RefreshError, auth.TransportError) as error:
        if is_credentials_outage(error):
            raise ProviderUnavailable(f"{what}: {error}") from error
        raise no_credentials(what, error) from error
    except auth.DefaultCredentialsError as error:
        raise no_credentials(what, error) from error
    except (exceptions.Forbidden, exceptions.BadRequest) as error:
        if advice := _refusal(error):
            raise BadRequest(f"{what}: {error}; {advice}") from error
        if isinstance(error, exceptions.BadRequest):
            raise ProviderUnavailable(f"{what}: {error}") from error
        raise PermissionMissing(f"{what}: {error}; {_grant(str(error))}") from error
    except (exceptions.Unauthorized, auth.GoogleAuthError) as error:
        raise PermissionMissing(f"{what}: {error}; {_grant(str(error))}") from error
    except requests.exceptions.ContentDecodingError as error:
        raise compressed(what) from error
    except (
        exceptions.GoogleAPIError,
        requests.RequestException,
        urllib3.exceptions.HTTPError,
        http.client.HTTPException,
        ConnectionError,
        DataCorruption,
    ) as error:
        raise ProviderUnavailable(f"{what}: {error}") from error


def _refusal(error: Any) -> str | None:
    """What to do about a refusal that no role changes. Uploads have Google's answer as text."""
    answer = f"{error} {error.errors}"
    return next((advice for sign, advice in _REFUSALS.items() if sign in answer), None)


def is_credentials_outage(error: Exception) -> bool:
    """Whether the server that issues credentials, such as the metadata server of a VM, did not
    answer or failed, and did not refuse them."""
    from google.auth import exceptions as auth

    if isinstance(error, auth.RefreshError) and not error.retryable:
        cause = error.__cause__
        return isinstance(cause, auth.TransportError) and is_credentials_outage(cause)
    if isinstance(error, auth.TransportError):
        # The metadata server's answer, unless it was repeated in vain: 404 without an account.
        status = getattr(error.args[-1], "status", None)
        return status is None or status >= HTTPStatus.INTERNAL_SERVER_ERROR
    return isinstance(error, auth.RefreshError)


def is_damaged_upload(error: Exception) -> bool:
    """Whether what arrived differs from what was sent. Google rejects a single request for that
    with 400; after a session the client compares, and deletes the object."""
    from google.api_core import exceptions
    from google.cloud.storage.exceptions import DataCorruption

    rejected = isinstance(error, exceptions.BadRequest) and "CRC32C" in str(error)
    return rejected or isinstance(error, DataCorruption)


def _grant(answer: str) -> str:
    """The role that this identity needs. Google checks the permission to list objects on the
    bucket, where a condition on the names of objects never holds, and answers 403 for a missing
    object to an identity without it (cloud.google.com/storage/docs/access-control/iam)."""
    permission = _PERMISSION.search(answer)
    if permission is None:
        return "grant roles/storage.objectUser on the bucket to this identity"
    if permission[0] == "storage.objects.list":
        return (
            "grant storage.objects.list on the bucket to this identity, by "
            "roles/storage.objectUser without a condition, or by roles/storage.legacyBucketReader "
            "in addition to a role with a condition on resource.name"
        )
    return (
        f"grant {permission[0]} to this identity, by roles/storage.objectUser on the bucket; if it "
        "has that role, its condition excludes this object"
    )
