package driver

import (
	"bytes"
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	metadatav1beta1 "k8s.io/dynamic-resource-allocation/api/metadata/v1beta1"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/klog/v2"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/device/attribute"
	"github.com/dra-shared/dra-driver-shared/driver/record"
	"github.com/dra-shared/dra-driver-shared/internal/files"
)

// Device metadata (KEP-5304) is a file per claim and request that containers
// find below /var/run/kubernetes.io/dra-device-attributes. The helper writes it
// when a claim is prepared; what is known only when a pod is attached is
// written into it then. By that time the runtime has bind-mounted the file: it
// is changed in place, and before the container's program starts.
//
// The helper knows nothing of locks, crashes and what somebody may remove: it
// writes through the functions here.

func (d *Driver) metadataOptions() []kubeletplugin.Option {
	return []kubeletplugin.Option{
		kubeletplugin.EnableDeviceMetadata(true, []schema.GroupVersion{metadatav1beta1.SchemeGroupVersion}),
		kubeletplugin.CDIDirectory(d.options.CDIDir),
		kubeletplugin.MetadataFileOps(kubeletplugin.MetadataFileOperations{
			WriteFile: d.writeMetadata, RemoveAll: d.removeMetadata,
			Remove: func(path string) error { return files.Remove(d.options.Failpoints, "metadata CDI spec", path, false) },
		}),
	}
}

// Names that the helper gives its files (kubeletplugin/metadata.go, v0.37).
const (
	metadataDir  = "dra-device-metadata" // below the plugin's directory, then NAMESPACE_CLAIM/REQUEST/
	metadataFile = "metadata.json"
)

// writeMetadata writes one of the helper's files. The helper has let go of the
// claim's lock, or never had it.
func (d *Driver) writeMetadata(path string, content []byte, mode os.FileMode) error {
	release, err := d.locks.Named(metadataDir)
	if err != nil {
		return err
	}
	defer release()
	if filepath.Base(path) == metadataFile {
		return files.Rewrite(d.options.Failpoints, "metadata", path, content, files.Options{Mode: mode})
	}
	if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, content) {
		return nil
	}
	return files.Replace(d.options.Failpoints, "metadata CDI spec", path, content, files.Options{Mode: mode})
}

// metadataSpecOf is the UID of the claim that a metadata CDI spec is of.
func (d *Driver) metadataSpecOf(path string) types.UID {
	uid, _, _ := strings.Cut(strings.TrimPrefix(filepath.Base(path), d.options.DriverName+"_metadata_"), "_")
	return types.UID(uid)
}

// isHelping tells whether the helper is there.
func (d *Driver) isHelping() bool {
	select {
	case <-d.helping:
		return true
	default:
		return false
	}
}

// restoreMetadata makes the helper write again what somebody removed. It does so
// only when a claim is prepared, and the kubelet prepares no claim of a pod that
// runs: so the plugin asks itself, by the kubelet's way in.
func (d *Driver) restoreMetadata(ctx context.Context) {
	if !d.isHelping() {
		return // nobody would answer yet
	}
	claims, _ := d.claims.List() // unreadable ones are told where they matter
	for _, c := range claims {
		if c.Phase != record.Prepared || !d.claims.Current(c) || d.hasMetadata(c) {
			continue
		}
		if err := d.prepareAgain(ctx, c); err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "Restore device metadata", "claim", klog.KRef(c.Namespace, c.Name))
		}
	}
}

func (d *Driver) hasMetadata(c *record.Claim) bool {
	for _, s := range c.Shares {
		request := resourceclaim.BaseRequestRef(s.Request)
		for _, path := range []string{
			filepath.Join(d.options.PluginDir, metadataDir, c.Namespace+"_"+c.Name, request, metadataFile),
			filepath.Join(d.options.CDIDir, d.options.DriverName+"_metadata_"+string(c.UID)+"_"+request+".json"),
		} {
			if _, err := os.Stat(path); err != nil {
				return false
			}
		}
	}
	return true
}

func (d *Driver) prepareAgain(ctx context.Context, c *record.Claim) error {
	socket := "dra.sock" // the helper's names
	if d.options.RollingUpdate {
		socket = "dra-" + d.options.Instance + ".sock"
	}
	conn, err := grpc.NewClient("unix://"+filepath.Join(d.options.PluginDir, socket), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, reportTimeout)
	defer cancel()
	d.restoring.Store(c.UID, true)
	defer d.restoring.Delete(c.UID)
	answer, err := drapb.NewDRAPluginClient(conn).NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{
		Claims: []*drapb.Claim{{Namespace: c.Namespace, Name: c.Name, Uid: string(c.UID)}}})
	if err != nil {
		return err
	}
	if text := answer.GetClaims()[string(c.UID)].GetError(); text != "" {
		return errors.New(text)
	}
	return nil
}

// removeMetadata removes a claim's files. They are named for the claim's name:
// they stay if another claim of that name has been prepared meanwhile.
func (d *Driver) removeMetadata(dir string) error {
	if d.isPreparedAs(filepath.Base(dir)) {
		return nil
	}
	return d.options.Failpoints.Do("remove metadata", func() error { return os.RemoveAll(dir) })
}

// isPreparedAs tells whether there is a record of a claim NAMESPACE_NAME; also
// if records cannot be read.
func (d *Driver) isPreparedAs(name string) bool {
	all, err := d.claims.List()
	return err != nil || slices.ContainsFunc(all, func(c *record.Claim) bool { return c.Namespace+"_"+c.Name == name })
}

// metadataOf is what is told about a share: what is published of its device,
// what is granted, and its link if a single pod has it; pending are attachments
// that have no record yet.
func (d *Driver) metadataOf(ctx context.Context, claim *record.Claim, share record.Share, pending ...attach.Record) *kubeletplugin.DeviceMetadata {
	m := &kubeletplugin.DeviceMetadata{Attributes: map[string]resourceapi.DeviceAttribute{}}
	attributes := attribute.Granted(share.Capacity)
	if share.AdminAccess {
		attributes = attribute.Map{} // what the allocation says of capacity counts for nothing
	}
	maps.Copy(attributes, d.attributesOf(share))
	for name, value := range attributes {
		m.Attributes[string(name)] = value
	}
	m.NetworkData = d.networkDataOf(ctx, claim, share, pending)
	return m
}

func (d *Driver) attributesOf(share record.Share) attribute.Map {
	kind := d.recordedKind(share)
	if kind == nil {
		return nil
	}
	for _, device := range kind.Devices() {
		if device.Name == share.Device {
			return device.Attributes
		}
	}
	return nil
}

func (d *Driver) networkDataOf(ctx context.Context, claim *record.Claim, share record.Share, pending []attach.Record) *resourceapi.NetworkDeviceData {
	attacher := d.attacherOf(share)
	if attacher == nil {
		return nil
	}
	all, _ := d.attachments.OfClaim(string(claim.UID)) // unreadable ones tell nothing
	for _, p := range pending {                        // it takes the place of one that was in its namespace before
		all = append(slices.DeleteFunc(all, func(a attach.Record) bool { return a.Namespace.Cookie == p.Namespace.Cookie && a.Share == p.Share }), p)
	}
	all = slices.DeleteFunc(all, func(a attach.Record) bool { return a.Share != share.Name })
	if len(all) != 1 {
		return nil // the file is every pod's
	}
	state, err := attacher.Read(ctx, share, all[0])
	if err != nil || state.Interface == "" {
		return nil
	}
	return networkData(state)
}

// updateMetadata tells the containers that have a share about its link, and
// about the others of its request: they are in one file. pending are attachments
// that have no record yet.
func (d *Driver) updateMetadata(ctx context.Context, uid types.UID, share record.Share, pending ...attach.Record) {
	select {
	case <-d.helping:
	case <-ctx.Done():
		return
	}
	claim, err := d.claims.Get(uid)
	if claim == nil || err != nil {
		return
	}
	var devices []kubeletplugin.Device
	for _, s := range claim.Shares {
		if s.Request == share.Request {
			devices = append(devices, kubeletplugin.Device{Requests: []string{s.Request}, PoolName: s.Pool, DeviceName: s.Device, Metadata: d.metadataOf(ctx, claim, s, pending...)})
		}
	}
	if err := d.helper.UpdateRequestMetadata(ctx, claim.Namespace, claim.Name, claim.UID, share.Request, devices); err != nil {
		klog.FromContext(ctx).Error(err, "Tell containers about their devices", "request", share.Request)
	}
}

// metadata are files of claims that are gone: the helper removes them when the
// kubelet unprepares a claim, and else nobody does.
func (c *collector) metadata(context.Context) (orphans []Orphan, failed error) {
	d := c.driver
	dirs, failed := filepath.Glob(filepath.Join(d.options.PluginDir, metadataDir, "*"))
	for _, dir := range dirs {
		if !d.isPreparedAs(filepath.Base(dir)) {
			orphans = append(orphans, Orphan{What: "device metadata " + dir, Remove: func(context.Context) error { return d.removeMetadata(dir) }})
		}
	}
	specs, err := filepath.Glob(filepath.Join(d.options.CDIDir, d.options.DriverName+"_metadata_*.json"))
	for _, path := range specs {
		if !d.isKnown(string(d.metadataSpecOf(path))) {
			orphans = append(orphans, c.file("metadata CDI spec", path))
		}
	}
	return orphans, errors.Join(failed, err)
}
