//! The node inside this process, for clients without a URL.

use crate::{
    address::Address,
    failure::{Failure, Result},
    session::Config,
};

/// Where the engine of this machine's cache directory is reached.
pub fn address(config: &Config) -> Result<Address> {
    let (Some(_origin), Some(_cache)) = (&config.origin, &config.cache) else {
        return Err(Failure::invalid("neither a node nor an origin is given").hint(
            "Client(\"http://host:port\") for a node, Client(origin=\"s3://bucket\", cache=\"/nvme/forebay:100GiB\") for one inside this process, or set FOREBAY_NODE",
        ));
    };
    Err(Failure::invalid("this build is the client alone").hint("install the full wheel, or give the URL of a node"))
}

/// Whether the arguments can name an engine at all; told when the client is made, not at its first call.
pub fn check(origin: Option<&str>, cache: Option<&str>) -> Result<()> {
    match (origin, cache) {
        (Some(_), Some(_)) => Ok(()),
        (Some(_), None) => Err(Failure::invalid("origin= needs cache=").hint("cache=\"/nvme/forebay:100GiB\": a directory and how much it may hold")),
        _ => Err(Failure::invalid("neither a node nor an origin is given").hint(
            "Client(\"http://host:port\") for a node, Client(origin=\"s3://bucket\", cache=\"/nvme/forebay:100GiB\") for one inside this process, or set FOREBAY_NODE",
        )),
    }
}
