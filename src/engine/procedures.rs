//! The procedures that an engine calls, and what it has learned of their types.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::shape::{DeclarationNumbers, Knowledge, Receivers};

/// A procedure's name, and what is known of the shapes of its types.
pub(crate) struct ProcedureInfo {
    pub name: Arc<str>,
    pub arguments: Knowledge,
    pub results: Receivers,
}

impl ProcedureInfo {
    pub(crate) fn new(name: &str) -> Arc<ProcedureInfo> {
        let name: Arc<str> = name.into();
        Arc::new(ProcedureInfo { arguments: Knowledge::new(Some(name.clone())), name, results: Receivers::default() })
    }
}

/// The name, and the names of the two types.
type ProcedureKey = (String, &'static str, &'static str);

/// All procedures that the program has named, so that each type's shape is learned once. (Different types of one name are
/// distinguished by the shapes of their values.)
#[derive(Default)]
pub(crate) struct Procedures {
    known: Mutex<HashMap<ProcedureKey, Arc<ProcedureInfo>>>,
    pub numbers: DeclarationNumbers,
}

impl Procedures {
    pub(crate) fn intern(&self, name: &str, arguments: &'static str, result: &'static str) -> Arc<ProcedureInfo> {
        let mut known = self.known.lock();
        known.entry((name.to_owned(), arguments, result)).or_insert_with(|| ProcedureInfo::new(name)).clone()
    }
}
