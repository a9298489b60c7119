"""Tasks and bundles on disk: small, safe to pass around, certain to fit."""
