//! Listeners and wiring: the S3 front, the batch and object APIs, admin, metrics, authentication.
