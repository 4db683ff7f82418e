"""Endpoint, region and credentials of S3, from where AWS's own tools take them."""

import os
from typing import NamedTuple

import boto3
import botocore.session
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from obstore.auth.boto3 import Boto3CredentialProvider

from daguerre.storage.errors import StoreError
from daguerre.storage.location import Location

_USUAL_REGION = "us-east-1"
_METHODS = {
    "env": "the environment",
    "shared-credentials-file": "~/.aws/credentials",
    "config-file": "~/.aws/config",
    "iam-role": "the instance's role",
    "container-role": "the container's role",
}
"""Boto's names for the sources of credentials, in words."""


class Access(NamedTuple):
    """Endpoint, region and signer of the requests to a bucket."""

    endpoint: str | None
    """Address of a store that is not AWS; None for AWS."""
    region: str
    provider: Boto3CredentialProvider | None
    """Signs requests; None for those that go unsigned."""
    credentials: str
    """The source of the credentials, for messages."""


def access(location: Location) -> Access:
    """Access to the bucket of a file. StoreError if the environment's settings cannot be used."""
    settings = botocore.session.Session()
    try:
        endpoint = _endpoint(settings)
        region = _region(settings, location.bucket, endpoint)
        return Access(endpoint, region, *_credentials(boto3.Session(botocore_session=settings)))
    except BotoCoreError as error:
        what = f"cannot be read: no usable AWS settings ({type(error).__name__}). Check ~/.aws and AWS_PROFILE"
        raise StoreError(location, what) from None


def _endpoint(settings: botocore.session.Session) -> str | None:
    """From the environment, else from the profile in ~/.aws/config."""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"):
        if os.environ.get(name):
            return os.environ[name]
    profile = settings.get_scoped_config()
    services = settings.full_config.get("services", {}).get(profile.get("services"), {})
    return services.get("s3", {}).get("endpoint_url") or profile.get("endpoint_url")


def _region(settings: botocore.session.Session, bucket: str, endpoint: str | None) -> str:
    """From the environment or the profile; else AWS tells where a bucket is. Other stores do not need it."""
    if region := os.environ.get("AWS_REGION") or settings.get_config_variable("region"):
        return region
    if endpoint:
        return _USUAL_REGION
    once = Config(signature_version=UNSIGNED, connect_timeout=1, read_timeout=3, retries={"total_max_attempts": 1})
    try:
        # A session of its own: boto3's usual one is made by the first call, and two threads break it.
        answer = boto3.Session().client("s3", region_name=_USUAL_REGION, config=once).head_bucket(Bucket=bucket)
    except ClientError as error:
        answer = error.response
    except BotoCoreError:
        return _USUAL_REGION  # the next request reports the fault
    return answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("x-amz-bucket-region", _USUAL_REGION)


def _credentials(session: boto3.Session) -> tuple[Boto3CredentialProvider | None, str]:
    """The signer of requests, and the source of its credentials."""
    if os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true"):
        return None, "no credentials: AWS_SKIP_SIGNATURE is set"
    credentials = session.get_credentials()
    if credentials is None:
        return None, "no credentials found in the environment, ~/.aws or the instance's role"
    credentials.get_frozen_credentials()
    return Boto3CredentialProvider(session), f"credentials from {_METHODS.get(credentials.method, credentials.method)}"
