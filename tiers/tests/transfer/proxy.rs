//! The network between two nodes, with faults.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};

/// What happens to a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It ends.
    Cut,
    /// A bit changes.
    Flip,
    /// Nothing passes any more, until the network is released.
    Hold,
}

/// A fault of the next connection.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    pub kind: Kind,
    /// In the direction to the receivers.
    pub is_to_receiver: bool,
    /// Behind so many bytes.
    pub after: usize,
}

/// A port before a prefill rank.
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    target: Mutex<Option<SocketAddr>>,
    fault: Mutex<Option<Fault>>,
    is_released: Mutex<bool>,
    released: Condvar,
}

impl Proxy {
    pub fn start() -> Proxy {
        let listener = TcpListener::bind((std::net::Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            target: Mutex::default(),
            fault: Mutex::default(),
            is_released: Mutex::default(),
            released: Condvar::default(),
        });
        let own = Arc::downgrade(&shared);
        std::thread::spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                let Some(shared) = own.upgrade() else {
                    return;
                };
                shared.pass(&stream);
            }
        });
        Proxy { address, shared }
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The port of the rank.
    pub fn lead_to(&self, target: SocketAddr) {
        *self.shared.target.lock().unwrap() = Some(target);
    }

    pub fn set(&self, fault: Option<Fault>) {
        *self.shared.fault.lock().unwrap() = fault;
        *self.shared.is_released.lock().unwrap() = false;
    }

    /// Lets held connections go on.
    pub fn release(&self) {
        *self.shared.is_released.lock().unwrap() = true;
        self.shared.released.notify_all();
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.release();
        // The thread ends with its next connection.
        let shared = std::mem::replace(&mut self.shared, Proxy::none());
        drop(shared);
        let _ = TcpStream::connect(self.address);
    }
}

impl Proxy {
    fn none() -> Arc<Shared> {
        Arc::new(Shared {
            target: Mutex::default(),
            fault: Mutex::default(),
            is_released: Mutex::new(true),
            released: Condvar::default(),
        })
    }
}

impl Shared {
    fn pass(self: Arc<Self>, receiver: &TcpStream) {
        let target = *self.target.lock().unwrap();
        let Some(Ok(sender)) = target.map(TcpStream::connect) else {
            return;
        };
        let fault = self.fault.lock().unwrap().take();
        for (from, to, is_to_receiver) in [(&sender, receiver, true), (receiver, &sender, false)] {
            let fault = fault.filter(|fault| fault.is_to_receiver == is_to_receiver);
            let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
            let shared = self.clone();
            std::thread::spawn(move || shared.copy(from, to, fault));
        }
    }

    fn copy(&self, mut from: TcpStream, mut to: TcpStream, fault: Option<Fault>) {
        let (mut passed, mut buffer) = (0, vec![0; 16 << 10]);
        loop {
            let bytes = match from.read(&mut buffer) {
                Ok(0) | Err(_) => {
                    let _ = to.shutdown(Shutdown::Write);
                    return;
                }
                Ok(bytes) => bytes,
            };
            let here = passed..passed + bytes;
            if let Some(fault) = fault.filter(|fault| here.contains(&fault.after)) {
                let at = fault.after - passed;
                match fault.kind {
                    Kind::Flip => buffer[at] ^= 1 << (fault.after % 8),
                    Kind::Cut => {
                        let _ = to.write_all(&buffer[..at]);
                        let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
                        return;
                    }
                    Kind::Hold => {
                        let mut is_released = self.is_released.lock().unwrap();
                        while !*is_released {
                            is_released = self.released.wait(is_released).unwrap();
                        }
                    }
                }
            }
            passed += bytes;
            if to.write_all(&buffer[..bytes]).is_err() {
                let _ = from.shutdown(Shutdown::Both);
                return;
            }
        }
    }
}
