//! The statistics that an engine writes when it ends, where the environment asks for that.

use super::EngineShared;

/// Names the file.
pub(crate) const STATS_VARIABLE: &str = "CALOMEL_STATS";
/// Names a signal, at which the engines write too.
#[cfg(feature = "json")]
pub(super) const STATS_SIGNAL_VARIABLE: &str = "CALOMEL_STATS_SIGNAL";

impl EngineShared {
    /// Appends the statistics to the file as one line of JSON. One write makes it a line of its own, whichever other engines
    /// and processes append to the file.
    #[cfg(feature = "json")]
    pub(super) fn write_stats(&self) {
        use std::fs::OpenOptions;
        use std::io::Write;

        let Some(file) = &self.statistics.file else { return };
        let path = self.expand(&file.to_string_lossy());
        let written = serde_json::to_string(&self.stats()).map_err(Into::into).and_then(|mut line| {
            line.push('\n');
            OpenOptions::new().append(true).create(true).open(&path)?.write_all(line.as_bytes())
        });
        if let Err(error) = written {
            tracing::warn!(target: "calomel::engine", %error, path = %path.display(), "can't write statistics");
        }
    }

    /// The name of a file, with the process and the engine put in.
    #[cfg(feature = "json")]
    pub(super) fn expand(&self, name: &str) -> std::path::PathBuf {
        name.replace("%p", &std::process::id().to_string()).replace("%e", &self.statistics.number.to_string()).into()
    }

    #[cfg(not(feature = "json"))]
    pub(super) fn write_stats(&self) {
        if self.statistics.file.is_some() {
            tracing::warn!(target: "calomel::engine", "{STATS_VARIABLE} is set, and calomel was built without the feature `json`");
        }
    }
}
