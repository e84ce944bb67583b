//! Ports of the loopback interface.

use std::net::TcpListener;

/// SeaweedFS adds this to each port, for gRPC.
const TWIN: u16 = 10_000;

/// A port that is free, as is its twin.
pub fn port() -> u16 {
    loop {
        let bound = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = bound.local_addr().unwrap().port();
        let twin = port.checked_add(TWIN);
        if twin.is_some_and(|twin| TcpListener::bind(("127.0.0.1", twin)).is_ok()) {
            return port;
        }
    }
}
