//! A trait declares a service: the attribute makes a server that defines its methods, and a client that has them. Both are
//! checked at compile time, and share the documentation.
//!
//! `cargo run --features macros --example 08_service`

use std::collections::BTreeMap;
use std::sync::Mutex;

use calomel::{Bulk, Engine, Request};
use serde::{Deserialize, Serialize};

/// Why a note is not there.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
enum NoteError {
    Unknown(String),
}

/// Notes with titles.
#[calomel::service]
trait Notes {
    /// Stores a note, and returns the one that it replaces.
    fn write(&self, title: String, text: String) -> Option<String>;
    /// The caller gets the error as a value, on which it can match.
    fn read(&self, title: String) -> Result<String, NoteError>;
    /// Pulls the text out of the caller's memory. The error of a fallible method fails the call.
    #[fallible]
    fn import(&self, request: &Request, title: String, text: Bulk) -> calomel::HandlerResult<usize>;
    /// No response is sent.
    #[one_way]
    fn erase(&self, title: String);
}

#[derive(Default)]
struct Notebook(Mutex<BTreeMap<String, String>>);

const LONGEST: usize = 1 << 20;

impl Notes for Notebook {
    fn write(&self, title: String, text: String) -> Option<String> {
        self.0.lock().unwrap().insert(title, text)
    }

    fn read(&self, title: String) -> Result<String, NoteError> {
        self.0.lock().unwrap().get(&title).cloned().ok_or(NoteError::Unknown(title))
    }

    fn import(&self, request: &Request, title: String, text: Bulk) -> calomel::HandlerResult<usize> {
        let mut bytes = vec![0; text.len().min(LONGEST)];
        let length = text.on(request.endpoint()).pull_into(&mut bytes[..])?;
        self.write(title, String::from_utf8(bytes)?);
        Ok(length)
    }

    fn erase(&self, title: String) {
        self.0.lock().unwrap().remove(&title);
    }
}

fn main() -> calomel::Result<()> {
    let server = Engine::server("tcp://127.0.0.1:0")?;
    NotesServer::serve(&server, Notebook::default())?;

    let client = Engine::client("tcp")?;
    let notes = NotesClient::new(client.lookup(server.address())?);
    assert_eq!(notes.write("today", "write an example")?, None);
    println!("today: {:?}", notes.read("today")?);
    println!("tomorrow: {:?}", notes.read("tomorrow")?);

    let poem = client.expose_read_only("Über allen Gipfeln\nist Ruh".repeat(100))?;
    println!("imported {} bytes", notes.import("poem", &poem.bulk())?);
    let garbage = client.expose_read_only(vec![0xff_u8; 10])?;
    println!("{}", notes.import("garbage", &garbage.bulk()).unwrap_err());

    // Each method can be started, too.
    let started = ["today", "poem"].map(|title| notes.start_read(title));
    for pending in started {
        println!("{} characters", pending?.wait()?.map_or(0, |text| text.chars().count()));
    }
    notes.erase("today")?;
    Ok(())
}
