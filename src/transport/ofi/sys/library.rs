//! The library itself, loaded when it is first needed: a program with feature `ofi` starts on machines that have none.

use std::ffi::{CStr, CString, OsString, c_char, c_int, c_void};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::sync::OnceLock;

use super::raw::{FiInfo, FidFabric};
use crate::fork::find_once;

/// Names the library: a path, or a name that the dynamic linker looks for.
const VARIABLE: &str = "CALOMEL_LIBFABRIC";
/// What the dynamic linker looks for otherwise. All versions since 1.0 have this name.
const NAME: &CStr = c"libfabric.so.1";
/// The version of the functions' interfaces that `raw` declares.
#[cfg(target_env = "gnu")]
const SYMBOLS: &CStr = c"FABRIC_1.8";

type GetInfo = unsafe extern "C" fn(u32, *const c_char, *const c_char, u64, *const FiInfo, *mut *mut FiInfo) -> c_int;
type FreeInfo = unsafe extern "C" fn(*mut FiInfo);
type DupInfo = unsafe extern "C" fn(*const FiInfo) -> *mut FiInfo;
type OpenFabric = unsafe extern "C" fn(*mut c_void, *mut *mut FidFabric, *mut c_void) -> c_int;
type StrError = unsafe extern "C" fn(c_int) -> *const c_char;
type GetVersion = unsafe extern "C" fn() -> u32;

/// The functions that the library exports; all others are reached by way of its objects.
pub(super) struct Library {
    pub version: Version,
    pub getinfo: GetInfo,
    pub freeinfo: FreeInfo,
    pub dupinfo: DupInfo,
    pub fabric: OpenFabric,
    pub strerror: StrError,
}

/// A version of libfabric.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Version(u32);

const OLDEST: Version = Version(2 << 16);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0 >> 16, self.0 & 0xffff)
    }
}

/// The library, loaded at the first call. An error says what was looked for, what was found, and how to get it.
pub(super) fn library() -> Result<&'static Library, &'static str> {
    static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
    let loaded = find_once(&LIBRARY, || load(std::env::var_os(VARIABLE)));
    loaded.as_ref().map_err(String::as_str)
}

const HOW: &str = "install libfabric 2.0 or newer (on Slingshot, Omni-Path and EFA systems the vendor's, by its module), or set \
                   CALOMEL_LIBFABRIC to the path of its libfabric.so.1";

fn load(named: Option<OsString>) -> Result<Library, String> {
    let name = match &named {
        Some(path) => CString::new(path.as_bytes()).map_err(|_| format!("{VARIABLE} contains a zero byte"))?,
        None => NAME.to_owned(),
    };
    let looked_for = match named {
        Some(_) => format!("{} (from {VARIABLE})", name.to_string_lossy()),
        None => format!("{} (where the dynamic linker looks)", name.to_string_lossy()),
    };
    // SAFETY: the name is a text that ends in 0. The library's initializers run: it is the one that the user has installed, or
    // named.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() {
        return Err(format!("libfabric can't be loaded: {looked_for}: {}; {HOW}", last_error()));
    }
    // The handle is never closed: functions of the library are called as long as the process lives.
    let version = symbol(handle, c"fi_version", false)
        .ok_or_else(|| format!("{looked_for} is not libfabric: it has no function fi_version; {HOW}"))?;
    // SAFETY: it is a function of this type in all versions of libfabric.
    let version = unsafe { std::mem::transmute::<*mut c_void, GetVersion>(version) };
    // SAFETY: it takes nothing, and may be called at any time.
    let version = Version(unsafe { version() });
    if version < OLDEST {
        return Err(format!("libfabric {version} was found at {looked_for}, which is too old; {HOW}"));
    }
    let find = |name: &CStr, versioned| {
        let missing = || format!("libfabric {version} at {looked_for} has no {}; {HOW}", name.to_string_lossy());
        symbol(handle, name, versioned).ok_or_else(missing)
    };
    let [getinfo, freeinfo, dupinfo] = [find(c"fi_getinfo", true)?, find(c"fi_freeinfo", true)?, find(c"fi_dupinfo", true)?];
    let [fabric, strerror] = [find(c"fi_fabric", false)?, find(c"fi_strerror", false)?];
    Ok(Library {
        version,
        // SAFETY: a function of this version has this type.
        getinfo: unsafe { std::mem::transmute::<*mut c_void, GetInfo>(getinfo) },
        // SAFETY: as above.
        freeinfo: unsafe { std::mem::transmute::<*mut c_void, FreeInfo>(freeinfo) },
        // SAFETY: as above.
        dupinfo: unsafe { std::mem::transmute::<*mut c_void, DupInfo>(dupinfo) },
        // SAFETY: as above.
        fabric: unsafe { std::mem::transmute::<*mut c_void, OpenFabric>(fabric) },
        // SAFETY: as above.
        strerror: unsafe { std::mem::transmute::<*mut c_void, StrError>(strerror) },
    })
}

/// A function of the library: of the version that `raw` declares, where interfaces have changed.
fn symbol(handle: *mut c_void, name: &CStr, versioned: bool) -> Option<*mut c_void> {
    // Other C libraries know no versions of symbols, and find the newest one.
    #[cfg(target_env = "gnu")]
    if versioned {
        // SAFETY: the handle is open, and both names end in 0.
        let found = unsafe { libc::dlvsym(handle, name.as_ptr(), SYMBOLS.as_ptr()) };
        return (!found.is_null()).then_some(found);
    }
    let _ = versioned;
    // SAFETY: the handle is open, and the name ends in 0.
    let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

fn last_error() -> String {
    // SAFETY: it takes nothing.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "unknown error".to_owned();
    }
    // SAFETY: it is a text that stays until this thread calls the linker again.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_named_with_the_remedy() {
        let Err(error) = load(Some("/nowhere/libfabric.so.1".into())) else { panic!("it was loaded") };
        for part in ["/nowhere/libfabric.so.1", "CALOMEL_LIBFABRIC", "2.0 or newer"] {
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn another_library_is_refused() {
        let Err(error) = load(Some("libc.so.6".into())) else { panic!("it was loaded") };
        assert!(error.contains("is not libfabric"), "{error}");
    }
}
