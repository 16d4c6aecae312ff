//! nginx: a plain web server over a directory, with or without WebDAV's PROPFIND.

use super::process::{Server, installed};
use forebay_origin::OriginConfig;
use std::{
    path::{Path, PathBuf},
    process::Command,
};

/// A running web server. Dropping this stops it and removes its directory.
pub struct Nginx {
    server: Server,
}

fn first_of(paths: &[&str]) -> PathBuf {
    let found = paths.iter().map(PathBuf::from).find(|p| p.exists());
    found.unwrap_or_else(|| installed(paths[0].into()))
}

impl Nginx {
    /// Answers only GET, HEAD and ranges.
    pub async fn start() -> Self {
        Self::launch(false).await
    }

    /// Also lists directories through PROPFIND.
    pub async fn with_dav() -> Self {
        Self::launch(true).await
    }

    async fn launch(dav: bool) -> Self {
        let binary = first_of(&["/usr/sbin/nginx", "/usr/local/sbin/nginx", "/usr/bin/nginx"]);
        let module = dav.then(|| {
            first_of(&[
                "/usr/lib/nginx/modules/ngx_http_dav_ext_module.so",
                "/usr/share/nginx/modules/ngx_http_dav_ext_module.so",
            ])
        });
        let server = Server::start("nginx", |port, dir| {
            std::fs::create_dir(dir.join("www")).expect("a directory for files");
            let d = dir.display();
            let load = module.as_ref().map(|m| format!("load_module {};", m.display())).unwrap_or_default();
            let methods = if dav { "dav_ext_methods PROPFIND;" } else { "" };
            // Test runs may be root's; nginx would then run its worker as another user, who cannot
            // read a private directory. SAFETY: geteuid has no arguments and cannot fail.
            let user = if unsafe { libc::geteuid() } == 0 { "user root;" } else { "" };
            let config = format!(
                "{load} {user} daemon off; master_process off; pid {d}/pid; error_log {d}/log;\n\
                 events {{ worker_connections 64; }}\n\
                 http {{ access_log off; default_type application/octet-stream; etag on;\n\
                 client_body_temp_path {d}/t1; proxy_temp_path {d}/t2; fastcgi_temp_path {d}/t3; uwsgi_temp_path {d}/t4; scgi_temp_path {d}/t5;\n\
                 server {{ listen 127.0.0.1:{port}; root {d}/www; location / {{ {methods} }} }} }}\n"
            );
            std::fs::write(dir.join("nginx.conf"), config).expect("its configuration");
            let mut c = Command::new(&binary);
            c.arg("-c").arg(dir.join("nginx.conf")).arg("-p").arg(dir);
            c
        })
        .await;
        Self { server }
    }

    /// Where the files are.
    pub fn root(&self) -> PathBuf {
        Path::new(self.server.directory()).join("www")
    }

    /// A configuration for everything under [`Nginx::root`].
    pub fn config(&self) -> OriginConfig {
        OriginConfig {
            url: format!("{}/", self.server.address()),
            ..Default::default()
        }
    }
}
