//! A shared directory, in which rank 0 leaves its address for the others. The file lives from rank 0's start until all ranks
//! have come. One that a killed job has left behind names an address where no engine answers to the number in it, and is replaced.

use std::fs::{self, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use super::rendezvous::MeetingPlace;
use crate::{Address, Error, Result};

/// The first word of each file.
const MARK: &str = "calomel-rank-0";
/// Longer files are of something else.
const MAX_FILE: u64 = 1024;

/// The file's text: what the ranks look for.
pub(super) fn notice(world: u64, address: &Address) -> String {
    format!("{world:016x},{address}")
}

/// What a notice says.
pub(super) fn read_notice(text: &str) -> Option<(u64, Address)> {
    let (world, address) = text.split_once(',')?;
    Some((u64::from_str_radix(world, 16).ok()?, address.parse().ok()?))
}

/// The name under which rank 0 of this world serves its meeting.
pub(super) fn meeting_of(world: u64) -> String {
    format!("rendezvous-{world:016x}")
}

/// Rank 0's file of one job.
pub(super) struct RendezvousFile {
    path: PathBuf,
    variable: String,
}

impl RendezvousFile {
    pub(super) fn new(directory: &Path, job: &str, variable: &str) -> RendezvousFile {
        let safe = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
        let job: String = job.chars().map(safe).take(100).collect();
        RendezvousFile { path: directory.join(format!("{MARK}.{job}")), variable: variable.to_owned() }
    }

    fn failed(&self, doing: &str, error: &std::io::Error) -> Error {
        Error::Launch { what: self.variable.clone(), reason: format!("{doing} {}: {error}", self.path.display()) }
    }

    /// What the file says now; `Err` describes what is there instead.
    pub(super) fn read(&self) -> Result<std::result::Result<MeetingPlace, String>> {
        // NFS remembers for half a minute that there was no file, unless the directory is opened.
        if let Some(directory) = self.path.parent() {
            let opened = fs::read_dir(directory).map(drop);
            opened.map_err(|error| self.failed("can't open the directory of", &error))?;
        }
        let text = match fs::metadata(&self.path).and_then(|about| match about.len() {
            0..=MAX_FILE => fs::read_to_string(&self.path),
            _ => Err(ErrorKind::InvalidData.into()),
        }) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Ok(Err(format!("rank 0 has left no {}", self.path.display())));
            }
            Err(error) if error.kind() == ErrorKind::InvalidData => String::new(),
            Err(error) => return Err(self.failed("can't read", &error)),
        };
        let said = text.strip_prefix(MARK).and_then(|text| text.strip_prefix(' ')).and_then(|text| text.strip_suffix('\n'));
        Ok(match said.and_then(read_notice) {
            Some((world, address)) => Ok(MeetingPlace { address, name: meeting_of(world), may_be_stale: true }),
            None => Err(format!("{} is no file of rank 0", self.path.display())),
        })
    }

    /// Writes the file if there is none; with `replace`, in place of the one that is there.
    pub(super) fn write(&self, world: u64, address: &Address, replace: bool) -> Result<Option<PublishedFile<'_>>> {
        let text = format!("{MARK} {}\n", notice(world, address));
        let temporary = self.path.with_file_name(format!(".{MARK}.{world:016x}"));
        let path = if replace { &temporary } else { &self.path };
        let mut file = match OpenOptions::new().write(true).create_new(true).mode(0o600).open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::AlreadyExists && !replace => return Ok(None),
            Err(error) => return Err(self.failed("can't write", &error)),
        };
        // A part of a file lacks the end of the line, and is taken for none.
        let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
        match written.and_then(|()| if replace { fs::rename(&temporary, &self.path) } else { Ok(()) }) {
            Ok(()) => Ok(Some(PublishedFile { file: self, text })),
            Err(error) => {
                let _ = fs::remove_file(path);
                Err(self.failed("can't write", &error))
            }
        }
    }
}

/// The file of this rank 0; removed when dropped.
pub(super) struct PublishedFile<'a> {
    file: &'a RendezvousFile,
    text: String,
}

impl Drop for PublishedFile<'_> {
    fn drop(&mut self) {
        // Another rank 0 may have replaced it, which has its own error.
        if fs::read_to_string(&self.file.path).is_ok_and(|text| text == self.text) {
            let _ = fs::remove_file(&self.file.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory that is removed with its files.
    struct Temporary(PathBuf);

    impl Temporary {
        fn new(name: &str) -> Temporary {
            let path = std::env::temp_dir().join(format!("calomel-directory-{}-{name}", std::process::id()));
            fs::create_dir(&path).unwrap();
            Temporary(path)
        }

        fn names(&self) -> Vec<String> {
            fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
        }
    }

    impl Drop for Temporary {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    #[test]
    fn file_lives_as_long_as_it_is_published() {
        let folder = Temporary::new("life");
        let address: Address = "tcp://10.0.0.1:7".parse().unwrap();
        let file = RendezvousFile::new(&folder.0, "7.1/x", "V=x");
        assert!(file.read().unwrap().is_err());
        let published = file.write(0xab, &address, false).unwrap().unwrap();
        assert_eq!(folder.names(), ["calomel-rank-0.7.1_x"]);
        let place = file.read().unwrap().unwrap();
        assert_eq!((place.address, &*place.name), (address.clone(), "rendezvous-00000000000000ab"));
        // A second rank 0 does not replace it unasked.
        assert!(file.write(0xcd, &address, false).unwrap().is_none());
        let second = file.write(0xcd, &address, true).unwrap().unwrap();
        drop(published);
        assert_eq!(file.read().unwrap().unwrap().name, "rendezvous-00000000000000cd");
        drop(second);
        assert_eq!(folder.names(), Vec::<String>::new());
    }

    #[test]
    fn what_is_no_file_of_rank_0_is_described() {
        let folder = Temporary::new("other");
        let file = RendezvousFile::new(&folder.0, "", "V=x");
        for content in
            ["", "calomel-rank-0", "calomel-rank-0 1,tcp\n", "calomel-rank-0 1,tcp://a:1", "other 1,tcp://a:1", &"x".repeat(5000)]
        {
            fs::write(&file.path, content).unwrap();
            let described = file.read().unwrap().map(|_| "a place");
            assert!(described.unwrap_err().contains("is no file of rank 0"), "{content}");
        }
        let absent = RendezvousFile::new(&folder.0.join("absent"), "", "V=x");
        let error = absent.read().map(|_| "a file").unwrap_err().to_string();
        assert!(error.contains("V=x") && error.contains("No such file"), "{error}");
        let error = absent.write(1, &"tcp://a:1".parse().unwrap(), false).map(|_| "a file").unwrap_err().to_string();
        assert!(error.contains("can't write"), "{error}");
    }
}
