"""krun's own certificate as the settings have it: which authority signs it, and what proves us to that
authority.

Import it only when HBONE_CA names an authority: its gRPC and REST clients would cost every other start.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from agent.config.certificate_settings import CertificateSettings
from shared.credentials.certificates.authority_client import Token
from shared.credentials.certificates.certificate_keeper import CertificateKeeper, KeeperSettings
from shared.credentials.certificates.renewal_schedule import RenewalRules
from shared.credentials.certificates.signing import Signer
from shared.credentials.tokens.tokens import FileToken
from shared.net.tls import certificate_folder
from shared.net.tls.root_files import RootSources


def make_keeper(settings: CertificateSettings, folder: Path) -> CertificateKeeper:
    """What keeps the files in `folder` current."""
    roots = RootSources(texts=settings.roots, files=settings.root_files)
    keeping = KeeperSettings(
        folder,
        settings.identity,
        roots=roots,
        lifetime_s=settings.lifetime_s,
        key_kind=settings.key_kind,
        rules=RenewalRules(share=settings.renew_at),
        start_timeout_s=settings.start_timeout_s,
        owner=settings.owner,
    )
    return CertificateKeeper(keeping, make_signer(settings, folder, roots))


def make_signer(settings: CertificateSettings, folder: Path, roots: RootSources) -> Signer:
    """The authority that the settings name; `folder` has the certificate that is to be renewed. Raises
    UnavailableError or ConfigError if the roots cannot be read, or a folder cannot be used."""
    if settings.ca == "dev":
        from shared.credentials.certificates.dev_ca import DevCa

        assert settings.folder is not None, "settings of a development CA"
        development = DevCa(settings.folder, settings.identity)
        development.check()  # at once, for what is wrong with its folder does not pass by itself
        return development
    if settings.ca == "istio":
        from shared.credentials.certificates.istio_ca import IstioCa

        assert settings.address is not None, "settings of an Istio CA"
        own = certificate_folder.written(folder)
        return IstioCa(
            settings.address,
            # Its certificate leads to the mesh's roots; without any it has to be one of the public ones.
            roots=roots.read if roots.read() else None,
            token=FileToken(settings.token_file).token if settings.token_file else None,
            certificate=None if settings.token_file else (own.certificates, own.private_key),
            cluster_id=settings.cluster_id,
            server_name=settings.server_name,
        )
    from shared.credentials.certificates.google_cas import GoogleCas

    token, rejected = (
        _of_file(settings.token_file) if settings.token_file else access_token(settings.metadata_host)
    )
    return GoogleCas(
        settings.pool,
        token,
        rejected=rejected,
        endpoint=settings.cas_url,
        reflected=settings.cas_names == "caller",
    )


def _of_file(file: Path) -> tuple[Token, Callable[[str], None]]:
    source = FileToken(file)
    return source.token, source.invalidate


def access_token(metadata_host: str) -> tuple[Token, Callable[[str], None]]:
    """What gives the access token of the account that the machine runs as, and what is told when a service
    does not take it. The first raises TokenError."""
    from shared.credentials.token_sources.metadata_access import MetadataAccess

    access = MetadataAccess(metadata_host)

    async def token() -> str:
        return (await access.access_token()).token

    return token, access.drop
